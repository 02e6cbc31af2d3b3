"""fairscale: OSS spreads the optimizer's state, ShardedDataParallel reduces each gradient to its owner."""

import torch
import torch.distributed as dist
from common import train
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = OSS(params=net.parameters(), optim=torch.optim.SGD, lr=0.01)
model = ShardedDataParallel(net, optimizer)
train(model, optimizer, lambda: torch.randn(8, 16))
dist.destroy_process_group()
