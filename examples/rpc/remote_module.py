"""Remote modules: modules in other processes that are called like local ones. Worker 0 is the only one with a program.

elaunch --nproc-per-node 3 remote_module.py --steps 100

An ensemble: each other worker has one expert, and worker 0 has the gate. All experts work at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
from joined import joined, names
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer

CHECKPOINT_EVERY = 10


class Expert(nn.Module):
    """A remote worker makes it from its class and arguments."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def train(workers: list[str], args: argparse.Namespace) -> None:
    """Worker 0's loop."""
    experts = [RemoteModule(f"{name}/cpu", Expert, args=(number,)) for number, name in enumerate(workers)]
    torch.manual_seed(100)
    gate = nn.Linear(16, len(experts))
    parameters = [each for expert in experts for each in expert.remote_parameters()]
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [*parameters, *(rpc.RRef(each) for each in gate.parameters())], lr=0.05
    )
    # A reference to the module itself reaches its other methods, and so its state.
    modules = [expert.get_module_rref() for expert in experts]
    start = load(args.checkpoint, gate, modules)
    for step in range(start + 1, args.steps + 1):
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        with autograd.context() as context:
            futures = [expert.forward_async(inputs) for expert in experts]
            votes = torch.cat(torch.futures.wait_all(futures), 1)
            output = (gate(inputs).softmax(1) * votes).sum(1)
            loss = nn.functional.mse_loss(output, inputs[:, :3].prod(1))
            autograd.backward(context, [loss])
            optimizer.step(context)
        if step % CHECKPOINT_EVERY == 0:
            save(args.checkpoint, step, gate, modules)
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    values = [value for each in modules for value in each.rpc_sync().state_dict().values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values))
    print(f"parameters {digest.hexdigest()[:12]}", flush=True)


def save(path: Path, step: int, gate: nn.Module, modules: list[rpc.RRef[nn.Module]]) -> None:
    """One file of all parts. Worker 0 fetches them: the other workers change nothing meanwhile."""
    state = {"step": step, "gate": gate.state_dict(), "experts": [each.rpc_sync().state_dict() for each in modules]}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load(path: Path, gate: nn.Module, modules: list[rpc.RRef[nn.Module]]) -> int:
    """The step of the checkpoint, which all parts have now; 0 without one."""
    if not path.exists():
        return 0
    state = torch.load(path)
    gate.load_state_dict(state["gate"])
    for module, its in zip(modules, state["experts"], strict=True):
        module.rpc_sync().load_state_dict(its)
    print(f"goes on after step {state['step']}", flush=True)
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("experts.pt"))
    args = parser.parse_args()
    with joined():
        if os.environ["RANK"] == "0":
            train(names(os.environ["ROLE_NAME"])[1:], args)


if __name__ == "__main__":
    main()
