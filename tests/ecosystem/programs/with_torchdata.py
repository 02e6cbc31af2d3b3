"""torchdata: a loader with a state, and processes of its own."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(8 * STEPS * dist.get_world_size(), 16))
loader = StatefulDataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, (inputs,) in enumerate(loader, 1):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    loader.state_dict()
    step(number)
dist.destroy_process_group()
