"""Makes steps of DDP when it is told to, and says how long they took. It knows nothing of its launcher.

BENCH_TURNS is a folder with a FIFO `go-RANK` for each rank and one called `took`. Each byte in `go-RANK` asks for a
turn of BENCH_STEPS steps; its end ends the program. Rank 0 writes a line of JSON to `took` for each turn: the mean
seconds of a step, and its CPU seconds over all ranks.
"""

import json
import os
import time
from pathlib import Path

import demo
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

TURNS, STEPS = Path(os.environ["BENCH_TURNS"]), int(os.environ["BENCH_STEPS"])

# Where the scheduler puts a rank differs from launch to launch, by more than what is measured.
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[demo.RANK % len(cores)]})
torch.set_num_threads(1)
go = os.open(TURNS / f"go-{demo.RANK}", os.O_RDONLY)
took = os.open(TURNS / "took", os.O_WRONLY)
dist.init_process_group("gloo")
model = DistributedDataParallel(demo.network())
optimizer = AdamW(model.parameters(), lr=3e-4, fused=True)
number = 0
while os.read(go, 1):
    # A rank that waits for its turn uses no CPU. All begin together.
    dist.barrier()
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        demo.loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
    seconds, of_cpu = time.perf_counter() - begun_s, torch.tensor(time.process_time() - cpu_s, dtype=torch.float64)
    dist.all_reduce(of_cpu)
    if demo.RANK == 0:
        os.write(took, json.dumps({"mean_s": seconds / STEPS, "cpu_s": float(of_cpu) / STEPS}).encode() + b"\n")
dist.destroy_process_group()
