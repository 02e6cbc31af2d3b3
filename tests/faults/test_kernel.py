"""Facts that only the kernel knows: which process was killed for memory."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elaunch.agent.diagnosis.oom import KernelLog, OutOfMemoryWatch, counter_files
from tests.harness import Job, script, wait_for

GREEDY = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(1000)
x = bytearray(1000 << 20)
for i in range(0, len(x), 4096):
    x[i] = 1
print("survived")
"""
# The kernel kills the worker store first, as the one with the highest score. That may free too little: then it kills
# the process that holds most, and that is a child of the worker.
CROWDING = """
import os, time
def stores():
    siblings = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
    return [pid for pid in siblings if open(f"/proc/{pid}/comm").read() == "elaunch-store\\n"]

# The worker may be here first: the store takes its name when it begins.
while not (found := stores()):
    time.sleep(0.01)
(store,) = found
open(f"/proc/{store}/oom_score_adj", "w").write("1000")
if os.fork() == 0:
    held = []
    while os.path.exists(f"/proc/{store}"):
        held.append(b"x" * (1 << 20))
        time.sleep(0.0001)
time.sleep(1000)
"""


@pytest.fixture
def tight_memory() -> Iterator[Path]:
    """The folder of a memory cgroup. Its limit is far above what the worker store needs: the worker is to be killed."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root, f"elaunch-test-{secrets.token_hex(4)}")
        with suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists():
                (folder / limit).write_text(str(500 << 20))
                yield folder
                wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the memory cgroup to empty")  # noqa: B023
                folder.rmdir()
                return
            folder.rmdir()
    pytest.skip("this user may make no memory cgroup")


def test_a_worker_killed_for_memory_is_told_from_one_killed_by_hand(tmp_path: Path, tight_memory: Path) -> None:
    def enter() -> None:
        (tight_memory / "cgroup.procs").write_text(str(os.getpid()))

    script(tmp_path, GREEDY)

    options = ("--no-preload", "--nproc-per-node", "2", "--max-restarts", "0")
    with Job(tmp_path, *options, "train.py", preexec_fn=enter) as job:
        assert job.wait() == 1

    assert "survived" not in job.output
    said = (
        r"rank 1 .* was killed by SIGKILL \(out of memory, says the kernel log; it held \d+(\.\d)? MiB; its cgroup may"
        r" hold 500 MiB, of which (4\d\d|500) MiB were used; rank 0 held \d+(\.\d)? MiB\)"
    )
    assert re.search(said, job.output), job.output
    assert re.search(r"^Next step: give the job more memory \(its limit is 500 MiB\)", job.output, re.MULTILINE)


def test_a_worker_store_killed_for_memory_is_named_so(tmp_path: Path, tight_memory: Path) -> None:
    def enter() -> None:
        (tight_memory / "cgroup.procs").write_text(str(os.getpid()))

    script(tmp_path, CROWDING)

    with Job(tmp_path, "--no-preload", "--max-restarts", "0", "train.py", preexec_fn=enter) as job:
        assert job.wait() == 1

    said = r"the worker store was killed by SIGKILL \((?:out of memory, says|its memory cgroup counted).*rank 0 held \d"
    assert re.search(said, job.output), job.output
    assert re.search(r"^Next step: give the job more memory, or hold less", job.output, re.MULTILINE)


def test_nobody_is_said_to_be_out_of_memory_who_was_killed_by_hand() -> None:
    watch = OutOfMemoryWatch(KernelLog(), counter_files())

    assert watch.word_on(os.getpid(), time.monotonic()) == ""
