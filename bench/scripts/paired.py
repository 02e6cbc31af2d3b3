"""Measures a step's time: the same training with the Keeper and without it, in turns.

Variables: BENCH_STATE_BYTES, the size of parameters and AdamW's moments; BENCH_SAMPLES, the number of pairs;
BENCH_COSTS, the file for what is measured, as JSON lines.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import devices
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elaunch.trainer import Keeper

LAYERS, BATCH = 24, 64
# A parameter and its two moments have four bytes each.
BYTES_PER_PARAMETER = 12
# The first steps of each turn are not counted: a Keeper begins with a snapshot, with sixteen commits that it checks
# whole, and with a search for state that it does not have. A turn is so long that a busy moment of the machine is a
# small part of it.
FRESH, COUNTED_MIN = 24, 100


def turn(steps: Iterator[int], commit: Any, counted: int) -> tuple[float, float]:
    """Make the steps. Returns the mean and the 95th percentile of the counted ones, in seconds.

    On a GPU a step without the Keeper is over here before the GPU has made it: only its mean counts.
    """
    ends_s = []
    for number, _ in enumerate(steps, 1):
        model(torch.ones(BATCH, width, device=device)).square().mean().backward()
        with commit():
            optimizer.step()
            optimizer.zero_grad()
        if number == FRESH:
            dist.barrier()
        if number >= FRESH:
            ends_s.append(time.monotonic())
    dist.barrier()
    mean_s = (time.monotonic() - ends_s[0]) / counted
    return mean_s, quantiles([b - a for a, b in pairwise(ends_s)], n=20)[-1]


def kept(counted: int) -> tuple[float, float]:
    global every
    # A program has no two Keepers of one name, and a restart is another program.
    os.environ["ELAUNCH_GENERATION"] = str(int(os.environ["ELAUNCH_GENERATION"]) + 1)
    with Keeper(model, optimizer) as keeper:
        found = turn(keeper.steps(keeper.step + FRESH + counted), keeper.commit, counted)
        every = keeper._sync._pace.every
    return found


def plain(counted: int) -> tuple[float, float]:
    return turn(iter(range(FRESH + counted)), nullcontext, counted)


def note(way: str, **values: float) -> None:
    if dist.get_rank() == 0:
        with Path(os.environ["BENCH_COSTS"]).open("a") as file:
            file.write(json.dumps({"way": way, "values": values}) + "\n")


device = devices.join_group()
width = round(math.sqrt(int(os.environ["BENCH_STATE_BYTES"]) / BYTES_PER_PARAMETER / LAYERS))
torch.manual_seed(0)
network = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)
model, optimizer = DistributedDataParallel(network), AdamW(network.parameters(), lr=1e-6, fused=True)
every = 1
plain(COUNTED_MIN), kept(COUNTED_MIN), kept(COUNTED_MIN)
# So long that each turn has the snapshots that belong to it, no fewer and no more.
agreed = torch.tensor(every * math.ceil(COUNTED_MIN / every), device=device)
dist.all_reduce(agreed, dist.ReduceOp.MAX)
for number in range(int(os.environ["BENCH_SAMPLES"])):
    # The order changes, so that a slow stretch of the machine affects both alike.
    turns = (kept, plain) if number % 2 else (plain, kept)
    took = {each.__name__: each(int(agreed)) for each in turns}
    values = {name: mean_s for name, (mean_s, _) in took.items()}
    note("pair", **values, **{f"{name}_p95": p95_s for name, (_, p95_s) in took.items()}, steps=int(agreed))
note("end")
dist.destroy_process_group()
