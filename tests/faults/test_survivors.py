"""What becomes of those that outlive a failure: one that saves has its grace, one that can do nothing does not."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness import Job, script
from tests.warm import SharedStart

# Longer than the test's deadline.
OPTIONS = ("--nproc-per-node", "3", "--failure-grace", "600", "--max-restarts", "1")

# Rank 2 fails, and rank 1 waits for rank 0 in a collective. In the first generation rank 0's handler saves. Its end
# frees rank 1, whose handler runs then. In the second one rank 0's handler enters a collective, as Lightning's does.
# With several groups nobody may break off the collective of one.
PROGRAM = """
import os, signal, time
import torch, torch.distributed as dist
from elaunch.agent.linux import thread_call
RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["ELAUNCH_GENERATION"])
def handle(*_):
    print("handler of rank", RANK, "runs", flush=True)
    if GENERATION == 1:
        dist.broadcast(torch.ones(1), src=1)
    for part in range(10):
        time.sleep(0.05)
    print("rank", RANK, "has saved", flush=True)
    os._exit(0)
dist.init_process_group("gloo")
if os.environ["GROUPS"] == "several":
    dist.barrier(dist.new_group())
signal.signal(signal.SIGTERM, handle)
pids = torch.zeros(3, dtype=torch.int64)
pids[RANK] = os.getpid()
dist.all_reduce(pids)
comes = f"rank-1-comes-{GENERATION}"
if RANK == 1:
    open(comes, "x").close()
    dist.broadcast(torch.ones(1), src=0)
while RANK == 0:
    time.sleep(0.01)
# A thread may wait so for a moment before it is in its collective.
looks = 0
while looks < 20:
    looks = looks + 1 if os.path.exists(comes) and thread_call(int(pids[1]), int(pids[1]))[0] == "futex" else 0
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def ended(folder: Path, start: SharedStart, groups: str) -> Job:
    """The job has ended. In its first generation each survivor has saved, and nobody needed the whole grace."""
    script(folder, PROGRAM)
    with Job(folder, *start.options, *OPTIONS, "train.py", env={**start.env, "GROUPS": groups}) as job:
        assert job.wait() == 1, job.output
    assert [job.stdout.count(f"rank {rank} has saved") for rank in range(2)] == [1, 1]
    assert "still ran after" not in job.stderr
    return job


def test_a_survivor_that_saves_has_its_grace_and_those_that_only_wait_are_killed_at_once(
    tmp_path: Path, torch_start: SharedStart
) -> None:
    job = ended(tmp_path, torch_start, "several")

    assert [job.stdout.count(f"handler of rank {rank} runs") for rank in range(2)] == [2, 1]
    said = re.findall(r"local rank ([\d, ]+) cannot act on SIGTERM: .* collective \(broadcast\)", job.stderr)
    assert said == ["0, 1"]


def test_survivors_that_wait_for_the_failed_rank_get_the_error_and_their_handlers_run(
    tmp_path: Path, torch_start: SharedStart
) -> None:
    job = ended(tmp_path, torch_start, "one")

    # In the second generation the handlers' collective of all ranks ends by the same error.
    assert [job.stdout.count(f"handler of rank {rank} runs") for rank in range(2)] == [2, 2]
    assert "cannot act on SIGTERM" not in job.stderr
