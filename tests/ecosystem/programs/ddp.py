"""DistributedDataParallel."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
for number in range(1, STEPS + 1):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
