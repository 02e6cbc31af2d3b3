"""Makes steps of DDP when it is told to, and says how long they took. It knows nothing of its launcher.

BENCH_TURNS is a folder with a FIFO `go-RANK` for each rank and one called `took`. Each byte in `go-RANK` asks for a
turn of BENCH_STEPS steps; its end ends the program. Rank 0 writes a line of JSON to `took` for each turn: the mean and
the median seconds of a step.
"""

import json
import os
import time
from pathlib import Path
from statistics import median

import demo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

TURNS, STEPS = Path(os.environ["BENCH_TURNS"]), int(os.environ["BENCH_STEPS"])

go = os.open(TURNS / f"go-{demo.RANK}", os.O_RDONLY)
took = os.open(TURNS / "took", os.O_WRONLY)
dist.init_process_group("gloo")
model = DistributedDataParallel(demo.network())
optimizer = AdamW(model.parameters(), lr=3e-4, fused=True)
number = 0
while os.read(go, 1):
    seconds = []
    # A rank that waits for its turn uses no CPU. All begin together.
    dist.barrier()
    for _ in range(STEPS):
        begun_s = time.perf_counter()
        demo.loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun_s)
        number += 1
    if demo.RANK == 0:
        os.write(took, json.dumps({"mean_s": sum(seconds) / STEPS, "median_s": median(seconds)}).encode() + b"\n")
dist.destroy_process_group()
