"""Distributed checkpoints: saved beside the training, and loaded again after a restart."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import STEPS, step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FOLDER = Path("checkpoint").resolve()

dist.init_process_group("gloo")
# A thread saves. Its collectives must not meet those of the training.
saving_group = dist.new_group(backend="gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
first = 1
if (FOLDER / ".metadata").exists():
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    states["step"] = 0
    dcp.load(states, checkpoint_id=FOLDER)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    first = states["step"] + 1
saving = None
for number in range(first, STEPS + 1):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number % 10 == 0:
        if saving:
            saving.result()
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        saving = dcp.async_save({**states, "step": number}, checkpoint_id=FOLDER, process_group=saving_group)
    step(number)
if saving:
    saving.result()
dist.destroy_process_group()
