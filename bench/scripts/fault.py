"""A script that trains until a file says which rank has to fail, and how: BENCH_FAULT holds "RANK HOW"."""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
FAULT = Path(os.environ["BENCH_FAULT"])
STAMPS_FD = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def stamp(event: str) -> None:
    fields = {"generation": 0, "event": event, "monotonic_s": time.monotonic(), "rank": RANK, "pid": os.getpid()}
    os.write(STAMPS_FD, json.dumps(fields).encode() + b"\n")


def fail(how: str) -> None:
    stamp("fault")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception":
        raise ValueError("bad batch")
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit 0":
        sys.exit(0)
    while how.startswith("endless loop"):
        pass


dist.init_process_group("gloo")
steps = 0
while True:
    dist.all_reduce(torch.ones(1))
    steps += 1
    if steps == 4:
        stamp("training")
    if FAULT.exists():
        rank, how = FAULT.read_text().split(" ", 1)
        if int(rank) == RANK:
            fail(how)
    time.sleep(0.02)
