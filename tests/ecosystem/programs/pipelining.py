"""A pipeline with one stage on each rank."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
stage = PipelineStage(module, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
inputs, targets = torch.randn(8, 16), torch.randn(8, 16)
for number in range(1, STEPS + 1):
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=targets, losses=[])
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
