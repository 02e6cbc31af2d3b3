"""A script that makes BENCH_STEPS steps, reports each on the link, and writes the seconds of each to BENCH_SECONDS."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from elaunch.trainer import link

WARM_UP = 50

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)))
optimizer = AdamW(model.parameters())
seconds = []
for step in range(WARM_UP + int(os.environ["BENCH_STEPS"])):
    begun_s = time.perf_counter()
    model(torch.ones(64, 512)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    link.report(step)
    seconds.append(time.perf_counter() - begun_s)
if dist.get_rank() == 0:
    Path(os.environ["BENCH_SECONDS"]).write_text(json.dumps(seconds[WARM_UP:]))
dist.destroy_process_group()
