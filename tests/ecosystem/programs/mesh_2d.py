"""A mesh of two dimensions: fully_shard over one, tensor parallelism over the other."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters())
for number in range(1, STEPS + 1):
    torch.manual_seed(1000 * number + mesh["data"].get_local_rank())
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
