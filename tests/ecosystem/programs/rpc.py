"""RPC: rank 0 keeps the parameters, the others compute gradients and send them."""

import os

import torch
import torch.distributed.rpc as rpc
from common import STEPS, step

weights = torch.zeros(16)


def add(gradient: torch.Tensor) -> torch.Tensor:
    weights.sub_(0.01 * gradient)
    return weights


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
for number in range(1, STEPS + 1):
    if rank == 0:
        weights.mul_(0.999)
    else:
        rpc.rpc_sync("worker0", add, (torch.randn(16),))
    step(number)
rpc.shutdown()
