"""Scalars for TensorBoard, written by rank 0."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
writer = SummaryWriter("tensorboard-logs") if dist.get_rank() == 0 else None
for number in range(1, STEPS + 1):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if writer:
        writer.add_scalar("loss", loss.item(), number)
    step(number)
if writer:
    writer.close()
dist.destroy_process_group()
