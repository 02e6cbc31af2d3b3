"""torchao: an optimizer whose state has 8 bits."""

import torch
import torch.distributed as dist
from common import train
from torchao.optim import AdamW8bit

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = AdamW8bit(model.parameters())
train(model, optimizer, lambda: torch.randn(8, 64))
dist.destroy_process_group()
