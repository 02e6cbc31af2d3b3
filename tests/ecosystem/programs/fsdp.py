"""FullyShardedDataParallel, the first form."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
model = FullyShardedDataParallel(
    net,
    auto_wrap_policy=size_based_auto_wrap_policy,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(1, STEPS + 1):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
