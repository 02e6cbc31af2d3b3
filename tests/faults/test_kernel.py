"""Facts that only the kernel knows: which process was killed for memory, and which processes a generation has."""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elaunch.agent.diagnosis.oom import KernelLog, OutOfMemoryWatch, counter_files
from elaunch.agent.guardian.cgroup import JobCgroup
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
HIDING = """
import os, subprocess, time
child = subprocess.Popen(["setsid", "env", "-i", "sleep", "1000"])
time.sleep(0.2)
print("hidden pid", child.pid, flush=True)
if os.environ["ELAUNCH_GENERATION"] == "0":
    raise SystemExit(3)
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


BORN = """
import os, pathlib, sys, time
def cgroup(pid):
    return pathlib.Path(f"/proc/{pid}/cgroup").read_text().rstrip("\\n").rsplit("/", 1)[1]
generation = int(os.environ["ELAUNCH_GENERATION"])
print(f"worker {generation} of {os.getppid()} is in {cgroup('self')}", flush=True)
if generation == 0:
    until_s = time.monotonic() + 100
    while "wait" in sys.argv and cgroup(os.getppid()) != "generation_1" and time.monotonic() < until_s:
        time.sleep(0.001)
    print(f"its fork server is in {cgroup(os.getppid())}", flush=True)
    os._exit(1)
"""


@pytest.fixture
def may_make_cgroups() -> None:
    probe = JobCgroup(f"elaunch-test-{secrets.token_hex(4)}")
    probe.make()
    if not probe.path:
        pytest.skip("this user may make no cgroup (v2)")
    Path(probe.path).rmdir()


@pytest.mark.usefixtures("may_make_cgroups")
@pytest.mark.parametrize("program", [("train.py", "wait"), ("train.py", "at once")])
def test_the_fork_server_is_in_the_cgroup_of_the_workers_that_it_forks_next_and_does_not_end_with_a_generation(
    program: tuple[str, ...], tmp_path: Path
) -> None:
    script(tmp_path, BORN)

    with Job(tmp_path, "--preload", "json", "--max-restarts", "1", *program) as job:
        assert job.wait() == 0
        found = re.findall(r"worker (\d) of (\d+) is in (\w+)", job.output)

    fork_server = found[0][1]
    assert "at once" in program or "its fork server is in generation_1" in job.output
    assert found == [("0", fork_server, "generation_0"), ("1", fork_server, "generation_1")]


@pytest.mark.usefixtures("may_make_cgroups")
def test_a_child_without_environment_or_session_ends_with_its_generation_and_with_the_agent(tmp_path: Path) -> None:
    script(tmp_path, HIDING)

    with Job(tmp_path, "--preload", "json", "--max-restarts", "1", "train.py") as job:
        job.wait_for_output(r"^elaunch: generation 1:")
        first = wait_for(lambda: job.pids("hidden"), "the first hidden child")[0]
        assert not alive(first)
        second = wait_for(lambda: job.pids("hidden")[1:], "the second hidden child")[0]
        assert alive(second)

        job.signal(signal.SIGKILL)

        wait_for(lambda: not alive(second), "the guardian to end the hidden child")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
