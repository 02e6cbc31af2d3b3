"""On two nodes the log of each names the rank that failed as the reason of the restart, not those that lost it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import on_two_nodes, script, slow
from tests.standin import WITH_TORCH, WITHOUT_TORCH

# One rank leaves the group. It raises when all that have lost it are gone and its agent, by SIGTERM, has shown that it
# has heard of one. An agent that heard of all at once would name the cause alone. The next generation is well.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

RANK, WORLD_SIZE, ONE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
GENERATION = int(os.environ["ELAUNCH_GENERATION"])

def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

# It has its whole grace since it answers.
asked = []
signal.signal(signal.SIGTERM, signal.SIG_DFL if RANK != ONE else lambda *_: asked.append(1))
dist.init_process_group("gloo")
Path(f"pid of {RANK} in {GENERATION}").write_text(str(os.getpid()))
dist.all_reduce(torch.tensor([1]))
pids = [int(Path(f"pid of {rank} in {GENERATION}").read_text()) for rank in range(WORLD_SIZE)]
if GENERATION == 0:
    if RANK != ONE:
        dist.all_reduce(torch.tensor([1]))
    dist.destroy_process_group()
    while not asked or any(is_there(pid) for pid in pids if pid != os.getpid()):
        time.sleep(0.05)
    raise ValueError("the bug")
dist.all_reduce(torch.tensor([1]))
dist.destroy_process_group()
"""
OPTIONS = ("--preload", "torch.distributed", "--failure-grace", "300")


# The stand-in's ranks fail in gloo's words, and two nodes need not import torch.
@pytest.mark.parametrize(
    ("one", "env"), [(3, WITHOUT_TORCH), slow(3, WITH_TORCH), slow(0, WITH_TORCH)], ids=["3", "3-gloo", "0-gloo"]
)
def test_both_nodes_name_the_rank_that_failed_and_not_those_that_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: int, env: dict[str, str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    script(tmp_path, PROGRAM)

    jobs = on_two_nodes(tmp_path, *OPTIONS, "train.py", str(one))

    for job in jobs:
        assert re.search(
            rf"^elaunch: (?:generation 1: .*|the cause: )?rank {one} \(.* raised ValueError: the bug in generation 0",
            job.stderr,
            re.M,
        ), job.stderr
