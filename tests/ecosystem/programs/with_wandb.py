"""A run of wandb, offline: rank 0 logs, and wandb's own process writes."""

import torch
import torch.distributed as dist
import wandb
from common import train

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = wandb.init(project="example", mode="offline") if dist.get_rank() == 0 else None
train(
    model,
    optimizer,
    lambda: torch.randn(8, 16),
    lambda number, loss: run and run.log({"loss": loss.item()}, step=number),
)
if run:
    run.finish()
dist.destroy_process_group()
