"""A module over several devices inside DDP: each rank has a model that is cut into two halves.

    elaunch --nproc-per-node 2 examples/ddp/two_devices.py

With two GPUs for each rank the halves are on different GPUs, and activations travel between them in the forward and
backward pass. DDP must get no `device_ids` then. On a machine without so many GPUs both halves are on the CPU: nothing
travels, and the rest is the same. elaunch's Keeper refuses such a module: it copies from one GPU per process.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LOCAL_RANK, LOCAL_WORLD_SIZE = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
has_two_gpus = torch.cuda.device_count() >= 2 * LOCAL_WORLD_SIZE
dist.init_process_group("nccl" if has_two_gpus else "gloo")
RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
devices = [torch.device("cuda", 2 * LOCAL_RANK + half) if has_two_gpus else torch.device("cpu") for half in range(2)]


class Halves(nn.Module):
    """The lower half on the first device, the upper one on the second."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = first, second
        self.lower, self.upper = nn.Linear(8, 32).to(first), nn.Linear(32, 1).to(second)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.lower(inputs.to(self.first)).relu()
        return self.upper(hidden.to(self.second))


def train(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = (model(inputs) - targets.to(devices[1])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


torch.manual_seed(1)
inputs, targets = torch.randn(4 * WORLD_SIZE, 8), torch.randn(4 * WORLD_SIZE, 1)
halves = Halves(*devices)
losses = train(DistributedDataParallel(halves), inputs[RANK::WORLD_SIZE], targets[RANK::WORLD_SIZE])
# One process with the whole batch and without DDP.
whole = Halves(*devices)
expected = train(whole, inputs, targets)

mean = torch.tensor(losses, device=devices[0])
dist.all_reduce(mean)
mean /= WORLD_SIZE
assert torch.allclose(mean.cpu(), torch.tensor(expected), atol=1e-5)
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(halves.parameters(), whole.parameters(), strict=True))
print(f"rank {RANK}: halves on {devices[0]} and {devices[1]}", flush=True)
if RANK == 0:
    print("losses of the whole batch:", *(f"{loss:.4f}" for loss in mean.tolist()), "as in one process without DDP")
# DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
gc.collect()
dist.destroy_process_group()
