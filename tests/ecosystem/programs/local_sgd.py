"""Post-local SGD: ranks train alone, and average their models now and then."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 4))
alone, _ = dist.new_subgroups(group_size=1)
model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=5), post_localSGD_hook)
averager = PeriodicModelAverager(period=4, warmup_steps=5)
optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager)
for number in range(1, STEPS + 1):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
