"""Collectives of Python objects, a barrier that names who is missing, and keys in the store."""

import datetime

import torch
import torch.distributed as dist
from common import STEPS, step

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
weights = torch.zeros(4)
for number in range(1, STEPS + 1):
    plan = [{"rate": 0.1 / number} if rank == 0 else None]
    dist.broadcast_object_list(plan, src=0)
    gradients: list[object] = [None] * size
    dist.all_gather_object(gradients, torch.randn(4))
    weights -= plan[0]["rate"] * sum(gradients) / size
    store.add("steps", 1)
    dist.monitored_barrier()
    step(number)
dist.destroy_process_group()
