"""ZeroRedundancyOptimizer: each rank keeps a part of the optimizer's state."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
for number in range(1, STEPS + 1):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
optimizer.consolidate_state_dict(to=0)
dist.destroy_process_group()
