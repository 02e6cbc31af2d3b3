"""A script that makes BENCH_STEPS steps and reports each on the link. Rank 0 writes what was measured, as JSON.

The file is BENCH_MEASURED: `steps_s` has the seconds of each step, `reports_s` the CPU seconds within the reports of
all of them, and `threads_s` those of the other Python threads meanwhile, which are elaunch's. When the measured steps
begin, it makes the file BENCH_BEGUN.
"""

import json
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elaunch.trainer import link

WARM_UP = 50


def threads_cpu_s() -> float:
    """CPU time of all Python threads but this one."""
    others = [each.native_id for each in threading.enumerate() if each is not threading.current_thread()]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in others) / 1e9


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)))
optimizer = AdamW(model.parameters())
steps_s, reports_s, threads_s = [], 0.0, 0.0
for step in range(WARM_UP + int(os.environ["BENCH_STEPS"])):
    if step == WARM_UP:
        reports_s, threads_s = 0.0, threads_cpu_s()
        if dist.get_rank() == 0:
            Path(os.environ["BENCH_BEGUN"]).touch()
    begun_s = time.perf_counter()
    model(torch.ones(64, 512)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    changed_s = time.thread_time()
    link.report(step)
    reports_s += time.thread_time() - changed_s
    steps_s.append(time.perf_counter() - begun_s)
measured = {"steps_s": steps_s[WARM_UP:], "reports_s": reports_s, "threads_s": threads_cpu_s() - threads_s}
if dist.get_rank() == 0:
    partial = Path(os.environ["BENCH_MEASURED"] + ".new")
    partial.write_text(json.dumps(measured))
    partial.rename(os.environ["BENCH_MEASURED"])
# The bench reads the CPU times of elaunch's processes now, before they have the end to do.
time.sleep(0.5)
dist.destroy_process_group()
