"""torch.compile over DistributedDataParallel."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.compile(DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters())
for number in range(1, STEPS + 1):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
