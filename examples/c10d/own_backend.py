"""A third party's backend, loaded by its name: DDP trains over it and knows nothing of it.

    elaunch --nproc-per-node 2 examples/c10d/own_backend.py [MODULE]

MODULE registers a backend of its own when it is imported; `store_backend.py` beside this file does so.
"""

import gc
import importlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def trained(group: dist.ProcessGroup | None) -> torch.Tensor:
    """The weights after three steps, whose gradients `group` sums."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.weight.detach().clone()


known = set(dist.Backend.backend_list)
importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "store_backend")
(name,) = set(dist.Backend.backend_list) - known

dist.init_process_group(name)
tensor = torch.tensor([float(dist.get_rank())])
dist.all_reduce(tensor)
assert float(tensor) == sum(range(dist.get_world_size()))
ours = trained(None)
theirs = trained(dist.new_group(backend="gloo"))
assert torch.allclose(ours, theirs, atol=1e-6)
if dist.get_rank() == 0:
    print(f"backend {dist.get_backend()!r} sums to {float(tensor):g}; DDP's weights over it are those over gloo")
# DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
gc.collect()
dist.destroy_process_group()
