"""A training whose ranks have buffers of their own, from its checkpoint on if there is one; run by each rank.

Run as `own_buffers.py CHECKPOINTS STEPS`. Each rank prints its buffers at the end, as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.keeper.keeper import Keeper


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("last", torch.zeros(2), persistent=False)
        self.register_buffer("queue", None)
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.center.mul_(0.5).add_(inputs.mean(0))
            self.last = self.last * 0.5 + inputs[0]
            self.queue = inputs if self.queue is None else torch.cat([self.queue, inputs])[-5:]
        found: Tensor = self.layer(inputs * self.table - self.center)
        return found


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
inner = Centred()
model = DistributedDataParallel(inner, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Keeper(model, optimizer, per_rank=(), checkpoints=sys.argv[1]) as keeper:
    for _ in keeper.steps(int(sys.argv[2])):
        model(torch.randn(2, 2)).sum().backward()
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
print(json.dumps({name: value.tolist() for name, value in inner.named_buffers()}), flush=True)
dist.destroy_process_group()
