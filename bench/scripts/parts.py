"""Measures the Keeper's copy of each step where each rank has a part of the state alone: FSDP2, ZeRO-1, PowerSGD.

Variables: BENCH_KIND, one of these in lower case; BENCH_STATE_BYTES, what rank 0 copies at each step; BENCH_SAMPLES,
the number of steps; BENCH_COSTS, the file for what is measured, as JSON lines.
"""

import json
import math
import os
import time
from pathlib import Path

import kinds
import torch
import torch.distributed as dist
from torch import nn

from elaunch.trainer import Keeper

KIND, SAMPLES = os.environ["BENCH_KIND"], int(os.environ["BENCH_SAMPLES"])
LAYERS, BATCH = 24, 64
# FSDP2: half of the parameters and of both moments. ZeRO-1: the parameters, and half of the moments. PowerSGD: the
# error feedback.
BYTES_PER_PARAMETER = {"fsdp2": 6, "zero-1": 8, "powersgd": 4}[KIND]
# The first copies take the memory from the kernel.
FRESH = 6


def main() -> None:
    dist.init_process_group("gloo")
    width = round(math.sqrt(int(os.environ["BENCH_STATE_BYTES"]) / BYTES_PER_PARAMETER / LAYERS))
    torch.manual_seed(0)
    model, optimizer, hook_state = kinds.spread(
        KIND, nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))), lr=1e-6
    )
    notes = []
    with Keeper(model, optimizer, hook_state=hook_state, lose_at_most=1) as keeper:
        for step in keeper.steps(FRESH + SAMPLES):
            begun_s = time.monotonic(), time.process_time()
            model(torch.ones(BATCH, width)).square().mean().backward()
            # Else a rank also waits for the others where it copies.
            dist.barrier()
            before_s = time.monotonic(), time.thread_time()
            with keeper.commit():
                begins_s = time.monotonic(), time.thread_time()
                optimizer.step()
                optimizer.zero_grad()
                ends_s = time.monotonic(), time.thread_time()
            after_s = time.monotonic(), time.thread_time()
            wall_s, cpu_s = (after_s[i] - ends_s[i] + begins_s[i] - before_s[i] for i in (0, 1))
            step_s, step_cpu_s = time.monotonic() - begun_s[0], time.process_time() - begun_s[1]
            if step > FRESH:
                notes.append(
                    {"held_s": wall_s, "cpu_s": cpu_s, "step_s": step_s - wall_s, "step_cpu_s": step_cpu_s - cpu_s}
                )
    if dist.get_rank() == 0:
        lines = [{"way": KIND, "values": values} for values in notes] + [{"way": "end", "values": {}}]
        Path(os.environ["BENCH_COSTS"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.destroy_process_group()


main()
