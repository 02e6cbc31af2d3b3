"""Kills at the moments when something is half done: an import, a fork, the store's start, a stop, a sweep."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from elaunch.agent.guardian.guardian import RUN_DIRS
from tests.faults.census import children, command
from tests.faults.processes import CHILDREN, SAY, Light, Watched, halting_server, is_alive
from tests.harness import DEADLINE_S, script, slow, wait_for

MEETS = f"""{SAY}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
print("reduced", int(total), "in generation", GENERATION)
"""

WAITS_IN_GENERATION_0 = f"""{SAY}
say(f"generation {{GENERATION}} worker", os.getpid())
while GENERATION == 0:
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("import_s", [0.0, 0.2, 0.6])
def test_a_fork_server_killed_at_any_time_of_its_import_of_torch_costs_no_more_than_time(
    tmp_path: Path, import_s: float
) -> None:
    script(tmp_path, MEETS)
    # One worker, since after the kill each worker has to import torch for itself.
    with Watched(tmp_path, "--nproc-per-node", "1", "train.py") as job:
        pid = job.process.pid
        # The fork server has its workers' command line until it sets its own.
        names = ("-u train.py", "elaunch: fork server")
        old = wait_for(lambda: next((c for c in children(pid) if command(c).endswith(names)), 0), "its start")
        time.sleep(import_s)
        assert not children(old), "it has imported already"

        os.kill(old, signal.SIGKILL)

        assert job.wait() == 0, job.output
        assert not is_alive(old)
        assert len(re.findall("reduced 1 in generation", job.stdout)) == 1
        assert "the fork server ended while it imported; each worker starts as a fresh interpreter" in job.stderr
        job.assert_nothing_is_left()


@pytest.mark.parametrize("born", [slow(1), 8, slow(16)])
def test_a_worker_killed_while_its_siblings_are_still_forked_is_a_restart_of_all(tmp_path: Path, born: int) -> None:
    workers = 32
    script(tmp_path, WAITS_IN_GENERATION_0)
    # The worker store is the first child.
    how, env = halting_server(tmp_path, forks=born + 2)
    with Watched(tmp_path, *how, "--nproc-per-node", str(workers), "train.py", env=env) as job:
        wait_for((tmp_path / "halts").exists, "the first workers")
        forked = children(job.fork_server().pid)
        assert born < len(forked) - 1 < workers

        os.kill(forked[born], signal.SIGKILL)
        (tmp_path / "go").touch()

        assert job.wait() == 0, job.output
        assert f"pid {forked[born]}) was killed by SIGKILL in generation 0" in job.stderr
        assert len(job.pids("generation 1 worker")) == workers
        assert re.search("succeeded.* 1 of 3 restarts used", job.stderr)
        job.assert_nothing_is_left(pids=forked)


@pytest.mark.slow
@pytest.mark.parametrize("start_s", [0.0, 0.002, 0.01])
def test_a_worker_store_killed_while_it_starts_is_a_restart(tmp_path: Path, start_s: float) -> None:
    script(tmp_path, MEETS)
    with Watched(tmp_path, "--preload", "torch", "--nproc-per-node", "2", "train.py") as job:
        server = job.fork_server().pid
        store = wait_for(lambda: children(server), "the store's fork")[0]
        time.sleep(start_s)

        os.kill(store, signal.SIGKILL)

        assert job.wait() == 0, job.output
        told = [line for line in job.said_by_agent() if line.startswith("the worker store was killed by SIGKILL")]
        assert len(told) == 1, job.output
        assert job.stdout.count("reduced 2 in generation 1") == 2
        assert re.search("succeeded.* 1 of 3 restarts used", job.stderr)
        job.assert_nothing_is_left()


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


def test_workers_killed_while_the_job_is_stopped_by_a_signal_end_it_as_the_signal_does(tmp_path: Path) -> None:
    script(tmp_path, SLOW_TO_STOP)
    with Light(tmp_path, "--nproc-per-node", "4", "--stop-grace", "600", "train.py") as job:
        workers = wait_for(lambda: len(w := job.pids("generation 0 worker")) == 4 and w, "all workers")
        job.signal(signal.SIGTERM)
        wait_for(lambda: len(job.pids("stopping")) == 4, "the workers' stop")

        for pid in workers:
            os.kill(pid, signal.SIGKILL)

        assert job.wait() == 143
        assert "generation 1" not in job.stderr
        job.assert_nothing_is_left(pids=workers)


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


ENDS_ON_DEMAND = f"""{SAY}
say("worker", os.getpid())
while not os.path.exists("go"):
    time.sleep(0.005)
"""


def all_but_the_sweep(folder: Path, job: Watched) -> psutil.Process:
    """Stop the guardian, and let the rest of the job end. Returns the guardian."""
    wait_for(lambda: job.pids("worker"), "the worker")
    guardian = job.guardian()
    guardian.suspend()
    (folder / "go").touch()
    wait_for(lambda: not [c for c in children(job.process.pid) if c != guardian.pid and is_alive(c)], "the end")
    assert job.run_dirs()
    assert job.process.poll() is None
    return guardian


def test_an_agent_killed_while_its_guardian_sweeps_leaves_nothing(tmp_path: Path) -> None:
    script(tmp_path, ENDS_ON_DEMAND)
    with Light(tmp_path, "--nproc-per-node", "1", "train.py") as job:
        guardian = all_but_the_sweep(tmp_path, job)

        job.kill_agent()
        guardian.resume()

        job.assert_nothing_is_left()


def test_a_guardian_killed_while_the_agent_waits_for_its_sweep_is_made_up_for_by_the_agent(tmp_path: Path) -> None:
    script(tmp_path, ENDS_ON_DEMAND)
    with Light(tmp_path, "--nproc-per-node", "1", "train.py") as job:
        guardian = all_but_the_sweep(tmp_path, job)

        guardian.kill()

        assert job.wait() == 0
        job.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("age_s", [0.0, 0.05, 0.2])
def test_a_guardian_killed_while_it_and_the_job_start_is_replaced(tmp_path: Path, age_s: float) -> None:
    script(tmp_path, ENDS_ON_DEMAND)
    with Light(tmp_path, "--nproc-per-node", "1", "train.py") as job:
        first = job.guardian()
        time.sleep(age_s)

        first.kill()

        job.wait_for_output("the guardian was killed; starting another")
        wait_for(lambda: job.pids("worker"), "the worker")
        assert job.guardian().pid != first.pid
        (tmp_path / "go").touch()
        assert job.wait() == 0
        job.assert_nothing_is_left()


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
