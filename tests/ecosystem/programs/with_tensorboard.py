"""Scalars for TensorBoard, written by rank 0."""

import torch
import torch.distributed as dist
from common import train
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
writer = SummaryWriter("tensorboard-logs") if dist.get_rank() == 0 else None
train(
    model,
    optimizer,
    lambda: torch.randn(8, 16),
    lambda number, loss: writer and writer.add_scalar("loss", loss.item(), number),
)
if writer:
    writer.close()
dist.destroy_process_group()
