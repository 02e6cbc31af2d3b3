"""Healthy programs whose ranks wait for one that is slow: none of them hangs.

Here a second stands for twenty: a hang takes 3 s, not 60. Each kind of slowness takes 13 s, so it stands for over
four minutes, and all of them together for most of an hour. Each is a job of its own: a job learns from its pauses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, script

SLOW_S = 13
PROGRAM = """
import collections, json, os, pickle, re, subprocess, sys, threading, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
RANK, WHAT, SLOW_S = int(os.environ["RANK"]), sys.argv[1], float(sys.argv[2])
END_S = time.monotonic() + SLOW_S
def goes_on():
    return time.monotonic() < END_S
def slow_step():
    a = torch.randn(1200, 1200)
    while goes_on(): a = torch.tanh(a @ a)
def evaluation():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    with torch.no_grad():
        while goes_on(): model(torch.randn(64, 256)).sum().item()
def checkpoint():
    state = {str(number): torch.randn(1000, 1000) for number in range(10)}
    while goes_on(): torch.save(state, "state.pt")
def slow_disk():
    with open("shard", "wb") as file:
        while goes_on():
            file.write(bytes(1 << 16))
            file.flush()
            time.sleep(0.5)
def stalled_loader():
    class Stalls(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            if index == 1: time.sleep(SLOW_S)
            return torch.ones(4)
    list(DataLoader(Stalls(), num_workers=1))
def busy_loader():
    class Works(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            while index == 1 and goes_on(): pass
            return torch.ones(4)
    list(DataLoader(Works(), num_workers=1))
def table():
    words, row = [i % 7 for i in range(20_000)], [0] * 20_001
    for i in range(len(words)):
        if not goes_on(): break
        for j in range(len(words)): row[j + 1] = min(row[j] + 1, row[j + 1] + 1, row[j] + (words[i] != words[j]))
def patterns():
    while goes_on(): re.sub(r"(\\w+) (\\w+)", r"\\2 \\1", "lorem ipsum dolor 123 " * 200_000)
def child():
    text = f"import time; end_s = time.monotonic() + {SLOW_S}\\nwhile time.monotonic() < end_s: pass"
    subprocess.run([sys.executable, "-c", text])
def compile():
    @torch.compile
    def function(x): return torch.sin(x) * torch.cos(x) + x.sum()
    function(torch.randn(100, 100))
def pause():
    time.sleep(SLOW_S)
dist.init_process_group("gloo")
torch.set_num_threads(1)
if RANK == 1: globals()[WHAT]()
dist.barrier()
print("done", RANK, flush=True)
"""
KINDS = [
    line[4:].partition("(")[0]
    for line in PROGRAM.splitlines()
    if line.startswith("def ") and "goes_on" not in line[:12]
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_slow_does_not_hang(tmp_path: Path, kind: str) -> None:
    script(tmp_path, PROGRAM)
    options = ("--hang-timeout", "3", "--on-hang", "warn", "--max-restarts", "0", "--nproc-per-node", "3")
    with Job(tmp_path, *options, "train.py", kind, str(SLOW_S)) as job:
        assert job.wait(180) == 0, job.output

    assert "hang" not in job.stderr, job.stderr
    assert job.stdout.count("done") == 3
