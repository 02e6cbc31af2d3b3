"""Counts the bytes that DDP's workers send in a step, with each communication hook.

It runs in a network namespace of its own, so that the counter of its loopback has nobody else's bytes. Rank 0 prints a
line of JSON for each hook: bytes per rank and step, the shapes of the parameters, and the bytes of each bucket.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from elaunch.trainer.ddp.options import HOOKS, DdpOptions
from elaunch.trainer.ddp.wrapper import wrap

# The first steps make the buckets, and PowerSGD exchanges whole gradients.
FRESH, COUNTED, LAYERS, WIDTH = 4, 5, 6, 512
POWERSGD_RANK = 2


def sent_bytes() -> int:
    """The bytes that have gone out of this namespace's loopback, over all ranks."""
    (line,) = (text for text in Path("/proc/net/dev").read_text().splitlines() if text.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measured(hook: str) -> dict[str, object]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    is_powersgd = "powersgd" in hook
    options = DdpOptions(
        hook,
        powersgd_rank=POWERSGD_RANK if is_powersgd else None,
        powersgd_start=2 if is_powersgd else None,
        bucket_mb=2.5,
    )
    model = wrap(module, options, torch.device("cpu"))
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    before = 0
    for step in range(FRESH + COUNTED):
        if step == FRESH:
            dist.barrier()
            before = sent_bytes()
        model(inputs).square().mean().backward()
        model.zero_grad()
    dist.barrier()
    sent = (sent_bytes() - before) / COUNTED / dist.get_world_size()
    sizes = [4 * bucket.buffer().numel() for bucket in model.reducer._get_zeros_like_grad_buckets()]
    shapes = [list(parameter.shape) for parameter in module.parameters()]
    return {"hook": hook, "ranks": dist.get_world_size(), "sent": sent, "shapes": shapes, "buckets": sizes}


dist.init_process_group("gloo")
for hook in HOOKS:
    found = measured(hook)
    if dist.get_rank() == 0:
        with Path(os.environ["BENCH_BYTES"]).open("a") as file:
            file.write(json.dumps(found) + "\n")
dist.destroy_process_group()
