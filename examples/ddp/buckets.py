"""How DDP divides the gradients into buckets, and divides them anew after the first step.

    elaunch --nproc-per-node 2 examples/ddp/buckets.py

DDP guesses that the last layer's gradient comes first. Here the layers are used in the other order. In the first
backward pass DDP notes the order in which gradients come, and before the second forward pass it makes the buckets
anew, in that order. With `find_unused_parameters` it never does, and then every bucket waits for the last gradient.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
RANK = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
WIDTH = 64
# A layer's weights fill one bucket.
BUCKET_MB = WIDTH * WIDTH * 4 / 2**20


class Backwards(nn.Module):
    """Layers a, b, c that are used in the order c, b, a: so a's gradient is the first."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.a(self.b(self.c(inputs)))


def buckets_of_three_steps(**options: bool) -> list[str]:
    """The layers of each bucket in the order of the exchange, one text for each step."""
    module = Backwards().to(device)
    names = {parameter: name[0] for name, parameter in module.named_parameters()}
    model = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, **options)
    found: list[str] = []

    def noting_hook(group: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found.append("".join(names[parameter] for parameter in bucket.parameters()))
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, noting_hook)
    steps = []
    for _ in range(3):
        model(torch.ones(1, WIDTH, device=device)).sum().backward()
        steps.append("|".join(found))
        found.clear()
    return steps


usual = buckets_of_three_steps()
static = buckets_of_three_steps(static_graph=True)
searching = buckets_of_three_steps(find_unused_parameters=True)
if RANK == 0:
    print("buckets in the order of their exchange, steps 1, 2 and 3:")
    print("usual:                 ", *usual)
    print("static_graph:          ", *static)
    print("find_unused_parameters:", *searching, " (a's gradient comes first, and waits for c's)")
assert usual[1:] == ["a|b|c", "a|b|c"], usual
assert static[-1] == "a|b|c", static
assert searching == ["c|b|a"] * 3, searching
# DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
gc.collect()
dist.destroy_process_group()
