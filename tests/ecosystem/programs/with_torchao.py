"""torchao: an optimizer whose state has 8 bits."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torchao.optim import AdamW8bit

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = AdamW8bit(model.parameters())
for number in range(1, STEPS + 1):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
