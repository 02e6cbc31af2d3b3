"""Measures a step's time: the same training with the Keeper and without it, in turns.

Variables: BENCH_SAMPLES, the number of pairs; BENCH_COSTS, the file for what is measured, as JSON lines.
"""

import json
import os
import time
from pathlib import Path

import demo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elaunch.trainer import Keeper

# The first steps of each turn are not counted, since a Keeper begins with a snapshot.
FRESH, COUNTED = 5, 40


def kept() -> float:
    with Keeper(model, optimizer) as keeper:
        before, started_s = keeper.step + FRESH, 0.0
        for step in keeper.steps(before + COUNTED):
            demo.loss(model, step).backward()
            with keeper.commit():
                change()
            if step == before:
                dist.barrier()
                started_s = time.monotonic()
        dist.barrier()
        return (time.monotonic() - started_s) / COUNTED


def plain() -> float:
    started_s = 0.0
    for step in range(1, FRESH + COUNTED + 1):
        demo.loss(model, step).backward()
        change()
        if step == FRESH:
            dist.barrier()
            started_s = time.monotonic()
    dist.barrier()
    return (time.monotonic() - started_s) / COUNTED


def change() -> None:
    optimizer.step()
    optimizer.zero_grad()


dist.init_process_group("gloo")
model = DistributedDataParallel(demo.network())
optimizer = AdamW(model.parameters(), lr=3e-4)
plain(), kept()
for number in range(int(os.environ["BENCH_SAMPLES"])):
    # The order changes, so that a slow stretch of the machine affects both alike.
    turns = (kept, plain) if number % 2 else (plain, kept)
    took_s = {turn.__name__: turn() for turn in turns}
    if demo.RANK == 0:
        with Path(os.environ["BENCH_COSTS"]).open("a") as file:
            file.write(json.dumps({"way": "pair", "values": took_s}) + "\n")
if demo.RANK == 0:
    with Path(os.environ["BENCH_COSTS"]).open("a") as file:
        file.write(json.dumps({"way": "end", "values": {}}) + "\n")
dist.destroy_process_group()
