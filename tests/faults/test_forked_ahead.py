"""The next generation's workers are forked ahead. They are what a fork at the restart would be."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.faults.processes import is_alive
from tests.harness import Job, script, wait_for

NEXT = "elaunch: next worker"
# Light, and with a worker store where torch is installed.
OPTIONS = ("--preload-only", "json", "--nproc-per-node", "3", "--log-dir", "logs")
PROGRAM = """
import atexit, gc, json, os, resource, signal, sys, threading, time
RANK, GENERATION = os.environ["RANK"], os.environ["ELAUNCH_GENERATION"]
status = dict(line.rstrip("\\n").split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
def kind(fd):
    return os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
streams = [[s.name, s.mode, s.encoding, s.line_buffering, s.write_through] for s in (sys.stdin, sys.stdout, sys.stderr)]
same = {
    "arguments": [sys.argv, sys.orig_argv, open("/proc/self/cmdline").read(), open("/proc/self/comm").read()],
    "descriptors": sorted(
        [fd, kind(fd)]
        for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    ),
    "signals": [status[name] for name in ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")],
    "process": [os.getsid(0) == os.getpid() == os.getpgid(0), os.getcwd(), os.umask(0o22), status["Seccomp"]],
    "share": [os.nice(0), sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE)],
    "oom": open("/proc/self/oom_score_adj").read(),
    "threads": [status["Threads"], threading.get_native_id() == os.getpid(), len(threading.enumerate())],
    "environment": sorted(os.environ),
    "modules": list(sys.modules),
    "main": sorted(vars(sys.modules["__main__"]))[:9],
    "streams": streams,
    "python": [sys._getframe().f_back is None, atexit._ncallbacks(), gc.isenabled(), sys.path],
    "parent dies": status["PPid"],
}
import random
facts = {"pid": os.getpid(), "parent": os.getppid(), "same": same, "number": random.random()}
with open(f"facts-{GENERATION}-{RANK}.part", "w") as file:
    json.dump(facts, file)
os.rename(file.name, f"facts-{GENERATION}-{RANK}")
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def facts(folder: Path, generation: int) -> list[dict[str, Any]]:
    """What the workers of a generation found, once all have."""
    paths = [folder / f"facts-{generation}-{rank}" for rank in range(3)]
    wait_for(lambda: all(path.exists() for path in paths), f"the workers of generation {generation}")
    return [json.loads(path.read_text()) for path in paths]


def waiting(job: Job) -> set[int]:
    """The processes of this job that were forked ahead and wait."""
    found = set()
    for process in psutil.Process(job.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[:1] == [NEXT]:
                found.add(process.pid)
    return found


def forked_ahead(job: Job) -> set[int]:
    """The same, once there is one for each worker and for the worker store."""
    return wait_for(lambda: pids if len(pids := waiting(job)) >= 4 else None, "processes forked ahead")


def test_workers_that_were_forked_ahead_are_as_forked_ones_and_none_outlives_the_job(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)

    with Job(tmp_path, *OPTIONS, "train.py") as job:
        first = facts(tmp_path, 0)
        ahead = forked_ahead(job)
        os.kill(first[0]["pid"], signal.SIGKILL)
        second = facts(tmp_path, 1)
        last = forked_ahead(job)
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.output

    assert {each["pid"] for each in second} <= ahead
    assert [each["same"] for each in second] == [each["same"] for each in first]
    assert {each["parent"] for each in second} == {each["parent"] for each in first}
    assert len({each["number"] for each in (*first, *second)}) == 6
    assert not any(map(is_alive, ahead | last))


def test_one_that_is_gone_or_was_signalled_or_stopped_is_no_worker(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)

    with Job(tmp_path, *OPTIONS, "train.py") as job:
        first = facts(tmp_path, 0)
        gone, signalled, stopped, *_ = forked_ahead(job)
        os.kill(gone, signal.SIGKILL)
        os.kill(signalled, signal.SIGUSR1)
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: not is_alive(gone), "the end of one that was killed")
        # It stops when it gets a processor.
        wait_for(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED, "the stop of another one")
        os.kill(first[0]["pid"], signal.SIGKILL)
        second = facts(tmp_path, 1)
        wait_for(lambda: not is_alive(signalled), "the end of one that was signalled")
        wait_for(lambda: not is_alive(stopped), "the end of one that was stopped")

    assert {gone, signalled, stopped}.isdisjoint(each["pid"] for each in second)
    assert [each["same"] for each in second] == [each["same"] for each in first]


def test_without_restarts_nothing_is_forked_ahead_and_a_killed_agent_leaves_nothing(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)

    with (
        Job(tmp_path, *OPTIONS, "--max-restarts", "0", "train.py") as plain,
        Job(tmp_path, *OPTIONS, "train.py") as job,
    ):
        ahead = forked_ahead(job)
        seen = waiting(plain)
        job.process.kill()
        wait_for(lambda: not any(map(is_alive, ahead)), "the end of those that wait")

    assert seen == set()
