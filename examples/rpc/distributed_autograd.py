"""Distributed autograd and optimizer: the layers of one model are in different processes, and a loss crosses them.

elaunch --nproc-per-node 2 distributed_autograd.py --steps 100

Worker 0 trains. Each worker has the parameters of its own layers, their gradients and their optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
from joined import joined, names
from step_files import StepFiles
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer


class Layers(nn.Module):
    """One worker's part of the model, with files for its state."""

    def __init__(self, number: int, folder: str) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.files = StepFiles(f"layers{number}", folder, every=50)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """References: the parameters stay here."""
        return [rpc.RRef(parameter) for parameter in self.net.parameters()]

    def steps(self) -> set[int]:
        return self.files.steps()

    def save(self, step: int) -> None:
        self.files.save(step, self.net.state_dict())

    def load(self, step: int) -> None:
        self.net.load_state_dict(self.files.load(step))

    def digest(self) -> str:
        state = b"".join(parameter.detach().numpy().tobytes() for parameter in self.net.parameters())
        return hashlib.sha256(state).hexdigest()[:12]


def train(workers: list[str], args: argparse.Namespace) -> None:
    """Worker 0's loop."""
    layers = [rpc.remote(name, Layers, args=(number, args.checkpoints)) for number, name in enumerate(workers)]
    parameters = [each for part in layers for each in part.rpc_sync().parameter_rrefs()]
    # It has an optimizer in each process. SGD without momentum has no state, which nobody could save.
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    done = set.intersection(*(part.rpc_sync().steps() for part in layers))
    start = max(done, default=0)
    if start:
        for part in layers:
            part.rpc_sync().load(start)
        print(f"goes on after step {start}", flush=True)
    head = torch.full((32, 1), 1 / 8)
    for step in range(start + 1, args.steps + 1):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(64, 32, generator=generator)
        with autograd.context() as context:
            hidden = inputs
            for part in layers:
                hidden = part.rpc_sync().forward(hidden)
            loss = nn.functional.mse_loss((hidden @ head)[:, 0], torch.tanh(inputs[:, :4].sum(1)))
            autograd.backward(context, [loss])
            optimizer.step(context)
        for future in [part.rpc_async().save(step) for part in layers]:
            future.wait()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(f"parameters {' '.join(part.rpc_sync().digest() for part in layers)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints", default="checkpoints-autograd")
    args = parser.parse_args()
    with joined():
        if os.environ["RANK"] == "0":
            train(names(os.environ["ROLE_NAME"]), args)


if __name__ == "__main__":
    main()
