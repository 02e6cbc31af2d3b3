"""The script of the recorded terminal: a model whose state survives a lost rank."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import Keeper

dist.init_process_group("gloo")
print(f"pid {os.getpid()} is rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

with Keeper(model, optimizer) as keeper:
    if dist.get_rank() == 0 and keeper.step:
        print(f"goes on after step {keeper.step}", flush=True)
    for step in keeper.steps(50):
        inputs = torch.randn(8, 32)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        time.sleep(0.05)  # as if an accelerator were at work
        with keeper.commit():
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
