"""One of two workers that train over a slow link: `tuned.py N cpu|accelerator PARTS`, with torch's variables of a rank.

With `cpu` it is the bundled GPT. With `accelerator` it is a chain of matrices, at each of which the worker pauses, as
if something else computed: then the CPUs have only the communication to do.

PARTS is the model's size: 4 for 38 MB of gradients, 1 for 8 MB.

Tunes the communication twice, first without lossy hooks, then these alone. Then DDP's defaults and the two choices take
turns, until each has had N steps. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import CommSettings, tune
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.tuning.rebuild import apply

# Few windows, so that even the fastest link costs something beside them.
WINDOWS, CONTEXT = 2, 64
# Steps in which DDP settles after a change: PowerSGD needs three.
SETTLING, IN_TURN = 3, 10
_PROBE_BYTES = 4_000_000
# The GPT's layers and width, and the chain's layers, by PARTS.
SIZES = {4: (3, 512, 9), 1: (1, 384, 2)}
# The chain's width, and the pauses of a layer.
WIDTH, FORWARD_S, BACKWARD_S = 1024, 0.005, 0.010


class Pausing(torch.autograd.Function):
    """Passes its input on, after a pause in either direction."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Chain(nn.Module):
    """Layers whose work is done elsewhere."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            # The pause of the backward pass comes before the layer's gradient.
            inputs = Pausing.apply(layer(inputs))  # type: ignore[no-untyped-call]
        return inputs.square().mean()


def link_mbit(peers: Peers) -> float:
    """What an all-reduce moves in a second: each of two ranks sends all of its bytes. The best of three."""
    probe = torch.zeros(_PROBE_BYTES // 4)
    best_s = float("inf")
    for _ in range(4):
        peers.largest([0])
        begun_s = time.perf_counter()
        dist.all_reduce(probe)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 8 * _PROBE_BYTES / best_s / 1e6


def main(count: int, compute: str, parts: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_gpt = compute == "cpu"
    layers, width, long = SIZES[parts]
    net: nn.Module = GPT(layers=layers, heads=8, width=width, context=CONTEXT, dropout=0.0) if is_gpt else Chain(long)
    model = DistributedDataParallel(net)
    # As much as possible of a step is the backward pass.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    peers = Peers()
    torch.manual_seed(dist.get_rank())
    windows = torch.randint(0, 256, (WINDOWS, CONTEXT + 1))
    inputs = (windows[:, :-1], windows[:, 1:]) if is_gpt else (torch.randn(2, WIDTH),)

    def backward() -> None:
        model(*inputs).backward()

    def step_s() -> float:
        """A whole step of the slowest rank."""
        peers.largest([0])
        begun_s = time.perf_counter()
        backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return peers.largest([round(1e9 * (time.perf_counter() - begun_s))])[0] / 1e9

    said: list[str] = []
    found: dict[str, Any] = {"mbit": link_mbit(peers), "megabytes": sum(p.numel() for p in net.parameters()) * 4 / 1e6}
    contenders = {"DDP's defaults": CommSettings()}
    for name, lossy in (("tuned", False), ("tuned, lossy", True)):
        tuned = tune(model, backward, lossy=lossy, say=said.append)
        assert tuned.result is not None, said
        contenders[name] = tuned.settings
        found[name] = {"words": str(tuned.settings), "passes": tuned.result.passes, "spent_s": tuned.result.spent_s}
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    while len(steps["tuned"]) < count:
        for name, settings in contenders.items():
            apply(model, settings, is_trial=True)
            for _ in range(SETTLING):
                step_s()
            steps[name] += [step_s() for _ in range(IN_TURN)]
    peers.close()
    if dist.get_rank() == 0:
        print(json.dumps({**found, "steps": {name: its[:count] for name, its in steps.items()}, "said": said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
