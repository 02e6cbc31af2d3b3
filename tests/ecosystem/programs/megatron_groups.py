"""Groups as Megatron makes them: each rank is in one group for its tensors, and in one for its data."""

import torch
import torch.distributed as dist
from common import STEPS, step

TENSOR = 2

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for start in range(0, size, TENSOR):
    ranks = list(range(start, start + TENSOR))
    group = dist.new_group(ranks)
    if rank in ranks:
        tensor_group = group
for offset in range(TENSOR):
    ranks = list(range(offset, size, TENSOR))
    group = dist.new_group(ranks)
    if rank in ranks:
        data_group = group

part = torch.nn.Linear(16 // TENSOR, 16, bias=False)
optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
for number in range(1, STEPS + 1):
    inputs = torch.randn(8, 16).chunk(TENSOR, dim=1)[rank % TENSOR]
    outputs = part(inputs)
    whole = outputs.detach().clone()
    dist.all_reduce(whole, group=tensor_group)
    outputs.backward(whole)
    dist.all_reduce(part.weight.grad, group=data_group)
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
