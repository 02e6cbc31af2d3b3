"""Facts that only the kernel knows: which process was killed for memory, and which processes a generation has."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elaunch.agent.guardian.cgroup import JobCgroup
from elaunch.agent.workers.oom import OutOfMemoryWatch
from tests.harness import Job, script, wait_for

GREEDY = "x = bytearray(400 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('survived')\n"
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
    """The folder of a memory cgroup with a limit of 150 MB."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root, f"elaunch-test-{secrets.token_hex(4)}")
        with suppress(OSError):
            folder.mkdir()
            if (folder / limit).exists():
                (folder / limit).write_text(str(150 << 20))
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

    with Job(tmp_path, "--preload", "json", "--max-restarts", "0", "train.py", preexec_fn=enter) as job:
        assert job.wait() == 1

    assert "survived" not in job.output
    assert "was killed by SIGKILL (out of memory, says the kernel log) in generation 0" in job.output


def test_nobody_is_said_to_be_out_of_memory_who_was_killed_by_hand() -> None:
    watch = OutOfMemoryWatch()

    assert watch.word_on(os.getpid()) == ""


def test_a_child_without_environment_or_session_ends_with_its_generation_and_with_the_agent(tmp_path: Path) -> None:
    probe = JobCgroup(f"elaunch-test-{secrets.token_hex(4)}")
    probe.make()
    if not probe.path:
        pytest.skip("this user may make no cgroup (v2)")
    Path(probe.path).rmdir()
    script(tmp_path, HIDING)

    with Job(tmp_path, "--preload", "json", "--max-restarts", "1", "train.py") as job:
        job.wait_for_output(r"^elaunch: generation 1:")
        first = job.pids("hidden")[0]
        assert not alive(first)
        second = wait_for(lambda: job.pids("hidden")[1:], "the second hidden child")[0]
        assert alive(second)

        job.signal(signal.SIGKILL)

        wait_for(lambda: not alive(second), "the guardian to end the hidden child", 1.0)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
