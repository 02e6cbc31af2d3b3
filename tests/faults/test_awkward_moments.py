"""Kills at the moments when something is half done: an import, a fork, the store's start, a stop, a sweep."""

from __future__ import annotations

import json
import os
import re
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from elaunch.agent.guardian.guardian import RUN_DIRS
from tests.faults.census import children
from tests.faults.processes import CHILDREN, SAY, Light, is_alive
from tests.harness import DEADLINE_S, script, wait_for

SLOW_TO_STOP = f"""{SAY}
signal.signal(signal.SIGTERM, lambda *_: say("stopping", os.getpid()))
say(f"generation {{GENERATION}} worker", os.getpid())
while GENERATION == 0:
    time.sleep(600)
"""


def test_workers_killed_while_their_group_stops_after_a_failure_do_not_hide_it_or_hold_it_up(tmp_path: Path) -> None:
    script(tmp_path, SLOW_TO_STOP)
    with Light(tmp_path, "--nproc-per-node", "4", "--failure-grace", "600", "train.py") as job:
        first, *others = wait_for(lambda: len(w := job.pids("generation 0 worker")) == 4 and w, "all workers")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(job.pids("stopping")) == 3, "the others' stop")

        for pid in others:
            os.kill(pid, signal.SIGKILL)

        assert job.wait() == 0, job.output
        assert len(job.pids("generation 1 worker")) == 4
        failures = [line for line in job.said_by_agent() if "was killed by SIGKILL" in line]
        assert len(failures) == 4
        assert f"pid {first})" in failures[0]
        assert re.search("succeeded.* 1 of 3 restarts used", job.stderr)
        job.assert_nothing_is_left(pids=[first, *others])


# Two hundred processes that end only by a sweep, which then takes long enough to be hit.
MANY = f"""{SAY}
for n in range(200):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Idle priority, so that the sweep is not over before the test sees the first of them end.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while True:
            signal.pause()
    # Said by the parent, which goes on.
print("many are there", flush=True)
say("worker", os.getpid())
signal.pause()
"""


@contextmanager
def before_all_others() -> Iterator[None]:
    """Have a CPU at each wake-up, where the system allows it. Others would have it first on a busy host, for long."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def test_an_agent_killed_while_it_sweeps_a_generation_leaves_the_rest_to_its_guardian(tmp_path: Path) -> None:
    script(tmp_path, MANY)
    with Light(tmp_path, "--nproc-per-node", "1", "train.py") as job:
        job.wait_for_output("^many are there")
        worker = wait_for(lambda: job.pids("worker"), "the worker")[0]
        many = children(worker)
        assert len(many) == 200
        with ExitStack() as stack:
            ends = select.poll()
            for pid in many:
                end = os.pidfd_open(pid)
                stack.callback(os.close, end)
                ends.register(end, select.POLLIN)
            stack.enter_context(before_all_others())
            os.kill(worker, signal.SIGKILL)
            # The kernel wakes this process at the first end. A process that polls might come only after the last end.
            assert ends.poll(DEADLINE_S * 1000), "no sweep began"

            os.kill(job.process.pid, signal.SIGKILL)
            # The guardian goes on at once, so all that have ended are counted in one call.
            ended = len(ends.poll(0))

        assert job.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert ended < len(many), "the sweep was over"
        job.assert_nothing_is_left(pids=many)


def test_when_agent_and_guardian_are_both_killed_the_kernel_still_ends_workers_and_fork_server(tmp_path: Path) -> None:
    script(tmp_path, f"{SAY}{CHILDREN}\nsay('worker', os.getpid())\nwhile True: signal.pause()")
    with Light(tmp_path, "--nproc-per-node", "2", "train.py") as job:
        workers = wait_for(lambda: len(w := job.pids("worker")) == 2 and w, "both workers")
        server, guardian = job.fork_server(), job.guardian()
        left = [word for word in guardian.cmdline() if word.startswith("/sys/fs/cgroup/")]
        left += [folder for folder in json.loads(guardian.environ()[RUN_DIRS]) if Path(folder).exists()]
        guardian.suspend()

        job.kill_agent()
        guardian.kill()

        wait_for(lambda: not any(is_alive(p) for p in [*workers, server.pid]), "workers and fork server end")
        # No process is left that knows of these, so the test ends them.
        strays = [pid for name in ("sleep", "setsid", "daemon") for pid in job.pids(name)]
        assert all(is_alive(pid) for pid in strays)
        for stray in strays:
            psutil.Process(stray).kill()
    assert len(left) >= 2
    script(tmp_path, "")
    with Light(tmp_path, "--nproc-per-node", "1", "train.py") as later:
        assert later.wait() == 0
    wait_for(lambda: not any(map(os.path.exists, left)), "the guardian of a later job to remove what is left")
