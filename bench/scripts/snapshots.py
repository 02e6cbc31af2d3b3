"""Measures copies of the training state into shared memory: by the Keeper, torch.save and DCP's async_save.

Variables: BENCH_STATE_BYTES, the size of parameters and AdamW's moments; BENCH_SAMPLES, copies of each way;
BENCH_SHARED, an empty folder in shared memory; BENCH_COSTS, the file for what is measured, as JSON lines.
"""

import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elaunch.trainer import Keeper

LAYERS, BATCH = 24, 64
# A parameter and its two moments have four bytes each.
BYTES_PER_PARAMETER = 12
SAMPLES, SHARED = int(os.environ["BENCH_SAMPLES"]), Path(os.environ["BENCH_SHARED"])
RANK = int(os.environ["RANK"])
# The first copies are slower: they take the memory from the kernel.
FRESH = 3
PACED_STEPS, PACED_S = 12, 3.0


def note(way: str, **values: float) -> None:
    if RANK == 0:
        with Path(os.environ["BENCH_COSTS"]).open("a") as file:
            file.write(json.dumps({"way": way, "values": values}) + "\n")


def private_bytes() -> float:
    """The private memory of all ranks of this node together."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    total = torch.tensor(float(found[1]) * 1024, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def shared_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def by_the_keeper(model: nn.Module, optimizer: AdamW) -> None:
    before = private_bytes()
    with Keeper(model, optimizer, lose_at_most=1) as keeper:
        steps, held_s = keeper.steps(SAMPLES + FRESH), []
        while True:
            dist.barrier()
            started_s = time.monotonic()
            step = next(steps, None)
            held_s.append(time.monotonic() - started_s)
            if step is None:
                break
            gradients(model)
            with keeper.commit():
                change(optimizer)
        memory = private_bytes() - before + shared_bytes(Path(os.environ["ELAUNCH_MEMORY"]))
    # The last call finds no step left, and copies nothing.
    for seconds in held_s[FRESH:-1]:
        note("keeper", held_s=seconds, memory=memory)


def paced(model: nn.Module, optimizer: AdamW) -> None:
    """Notes how many steps the Keeper leaves between two snapshots, and the time of a step."""
    with Keeper(model, optimizer, name="paced") as keeper:
        begun, started_s, in_steps_s = keeper.step, time.monotonic(), 0.0
        for step in keeper.steps(10**9):
            # All ranks must leave at the same step.
            if step - begun > PACED_STEPS and all_agree(time.monotonic() - started_s > PACED_S):
                gradients(model)
                with keeper.commit():
                    change(optimizer)
                break
            step_s = time.monotonic()
            gradients(model)
            with keeper.commit():
                change(optimizer)
            in_steps_s += time.monotonic() - step_s
        note("paced", every=keeper._around._pace.every, step_s=in_steps_s / (keeper.step - begun - 1))


def by_torch_save(model: nn.Module, optimizer: AdamW) -> None:
    before, path = private_bytes(), SHARED / "usual.pt"
    for number in range(SAMPLES + 1):
        gradients(model)
        change(optimizer)
        dist.barrier()
        started_s, memory = time.monotonic(), 0
        if RANK == 0:
            torch.save(state(model, optimizer), path.with_suffix(".new"))
            memory = shared_bytes(SHARED)
            path.with_suffix(".new").replace(path)
        seconds = time.monotonic() - started_s
        grown = private_bytes() - before
        if number:
            note("torch.save", held_s=seconds, whole_s=seconds, memory=max(0.0, grown) + memory)


def by_dcp(model: nn.Module, optimizer: AdamW) -> None:
    group, before = dist.new_group(backend="gloo"), private_bytes()
    for number in range(SAMPLES + 1):
        gradients(model)
        change(optimizer)
        dist.barrier()
        started_s = time.monotonic()
        folder = SHARED / f"dcp-{number}"
        saving: Any = async_save(state(model, optimizer), checkpoint_id=folder, process_group=group)
        seconds = time.monotonic() - started_s
        grown = private_bytes() - before
        saving.result()
        dist.barrier()
        whole_s, memory = time.monotonic() - started_s, shared_bytes(SHARED)
        # The older copy goes only now: until this one is complete, it is the only one.
        if RANK == 0:
            shutil.rmtree(SHARED / f"dcp-{number - 1}", ignore_errors=True)
        if number:
            note("async_save", held_s=seconds, whole_s=whole_s, memory=max(0.0, grown) + memory)


def state(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def gradients(model: nn.Module) -> None:
    model(torch.ones(BATCH, width)).square().mean().backward()


def change(optimizer: AdamW) -> None:
    optimizer.step()
    optimizer.zero_grad()


def all_agree(mine: bool) -> bool:
    least = torch.tensor(int(mine))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least)


dist.init_process_group("gloo")
width = round(math.sqrt(int(os.environ["BENCH_STATE_BYTES"]) / BYTES_PER_PARAMETER / LAYERS))
torch.manual_seed(0)
network = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
ddp, adamw = DistributedDataParallel(network), AdamW(network.parameters(), lr=1e-6, fused=True)
for _ in range(3):
    gradients(ddp)
    change(adamw)
by_the_keeper(ddp, adamw)
paced(ddp, adamw)
by_torch_save(ddp, adamw)
shutil.rmtree(SHARED, ignore_errors=True)
dist.barrier()
SHARED.mkdir(exist_ok=True)
by_dcp(ddp, adamw)
note("end")
dist.destroy_process_group()
