"""fully_shard, the second form of FSDP."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(1, STEPS + 1):
    model(torch.randn(8, 32)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
