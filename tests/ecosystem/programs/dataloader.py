"""DDP with a DistributedSampler, and a DataLoader whose worker processes are forked."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(256, 16), torch.randn(256, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
number = epoch = 0
while number < STEPS:
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        step(number)
    epoch += 1
dist.destroy_process_group()
