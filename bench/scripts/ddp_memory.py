"""Measures the memory of a worker per parameter, with DDP as BENCH_DDP says: options of DdpOptions, as JSON.

Rank 0 writes a line of JSON to BENCH_MEMORY: resident bytes per parameter after some steps, and at their highest,
beyond those of the process before it had a model.
"""

import ctypes
import gc
import json
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from elaunch.trainer.ddp.options import DdpOptions
from elaunch.trainer.ddp.wrapper import wrap

LAYERS, WIDTH = 16, 1024


def resident(name: str) -> int:
    """VmRSS or VmHWM, the highest so far, in bytes."""
    # Memory that is free goes back to the kernel first.
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])


def step(model: nn.Module, optimizer: AdamW | None) -> None:
    # One sample: activations take no room beside the weights.
    model(torch.ones(1, next(model.parameters()).shape[1])).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


dist.init_process_group("gloo")
# The first pass of a small model makes all that torch needs once.
small = wrap(nn.Linear(64, 64), DdpOptions(), torch.device("cpu"))
step(small, AdamW(small.parameters(), fused=True))
del small
gc.collect()
before = resident("VmRSS")
module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
parameters = sum(parameter.numel() for parameter in module.parameters())
model = wrap(module, DdpOptions(**json.loads(os.environ["BENCH_DDP"])), torch.device("cpu"))
optimizer = AdamW(model.parameters(), fused=True)
for _ in range(5):
    optimizer.zero_grad()
    step(model, optimizer)
after, highest = resident("VmRSS"), resident("VmHWM")
if dist.get_rank() == 0:
    found = {"steady": (after - before) / parameters, "highest": (highest - before) / parameters}
    Path(os.environ["BENCH_MEMORY"]).write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
