"""Automatic mixed precision, gradient accumulation, activation checkpoints, and an average of the weights."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
first, second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


model = DistributedDataParallel(Net())
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters())
for number in range(1, STEPS + 1):
    with model.no_sync(), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, 16)).square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model.module)
    step(number)
dist.destroy_process_group()
