"""Uneven inputs: ranks that are done early wait for the others."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Join([model]):
    for number in range(1, STEPS + 5 * dist.get_rank() + 1):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step(number)
dist.destroy_process_group()
