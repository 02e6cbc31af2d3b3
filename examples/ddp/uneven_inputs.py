"""Ranks with different numbers of batches: `join` lets a rank that is done take part in the others' collectives.

    elaunch --nproc-per-node 2 examples/ddp/uneven_inputs.py

Rank r has 3 + 2r batches. Without `join` rank 0 would leave, and the others would wait for its gradients.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
batches = [3 + 2 * rank for rank in range(WORLD_SIZE)]


def weight_after_all_batches(*, divide_by_initial_world_size: bool) -> float:
    """The only weight of a model whose gradient is 1 in each batch, after SGD with a rate of 1 from 0."""
    module = nn.Linear(1, 1, bias=False, device=device)
    nn.init.zeros_(module.weight)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for _ in range(batches[RANK]):
            model(torch.ones(1, 1, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # The last rank to join has made all steps. The others get its weights when it is done.
    return module.weight.item()


# A step divides the sum of the gradients either by all ranks, or by those that still have a batch.
still_there = [sum(count > step for count in batches) for step in range(max(batches))]
by_all = weight_after_all_batches(divide_by_initial_world_size=True)
by_the_rest = weight_after_all_batches(divide_by_initial_world_size=False)

assert abs(by_all + sum(still_there) / WORLD_SIZE) < 1e-5, by_all
assert abs(by_the_rest + max(batches)) < 1e-5, by_the_rest
if RANK == 0:
    print(f"batches of each rank: {batches}; ranks that had one in each step: {still_there}")
    print(f"divided by all ranks:        weight {by_all:.2f}; each batch counts the same")
    print(f"divided by those still there: weight {by_the_rest:.2f}; late steps are as large as early ones")
# DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
gc.collect()
dist.destroy_process_group()
