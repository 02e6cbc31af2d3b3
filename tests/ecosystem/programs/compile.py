"""torch.compile over DistributedDataParallel."""

import torch
import torch.distributed as dist
from common import train
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.compile(DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, lambda: torch.randn(8, 16))
dist.destroy_process_group()
