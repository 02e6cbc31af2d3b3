"""The processes that serve a job are killed or stopped: fork server, worker store, guardian."""

from __future__ import annotations

import errno
import re
import signal
import sys
from pathlib import Path

import psutil

from tests import no_pidfd
from tests.faults.processes import CHILDREN, SAY, Light, Watched, is_alive, library
from tests.harness import script, wait_for

# Generation 0 waits to be hurt, the next ones succeed.
WAITS_IN_GENERATION_0 = f"""{SAY}{CHILDREN}
say("parent", os.getppid())
say("worker", os.getpid())
while GENERATION == 0:
    signal.pause()
print("succeeds in generation", GENERATION)
"""


def test_a_killed_fork_server_takes_its_workers_along_and_the_next_generation_has_another(tmp_path: Path) -> None:
    script(tmp_path, WAITS_IN_GENERATION_0)
    with Light(tmp_path, "--nproc-per-node", "2", "train.py") as job:
        wait_for(lambda: len(job.pids("worker")) == 2, "both workers")
        old, first = job.fork_server(), job.pids("worker")

        old.kill()

        job.wait_for_output("succeeds in generation 1")
        assert not is_alive(old)
        assert not any(is_alive(pid) for pid in first)
        assert job.wait() == 0
        assert len(job.pids("worker")) == 4
        one, other, new, last = job.pids("parent")
        assert one == other == old.pid
        assert new == last != old.pid
        assert new != job.process.pid, "it is no fork server"
        logged = [line for line in job.logged_by_agent() if "fork server" in line]
        assert len(logged) == 1
        assert logged[0].startswith("the fork server was killed by SIGKILL")
        assert re.search("succeeded.* 1 of 3 restarts used", job.stderr)
        job.assert_nothing_is_left(pids=job.pids("sleep") + job.pids("setsid") + job.pids("daemon"))


def test_a_fork_server_killed_while_it_imports_is_replaced_by_fresh_interpreters(tmp_path: Path) -> None:
    env = library(tmp_path, "endless", "import time; open('importing', 'a').write('x'); time.sleep(600)")
    script(tmp_path, "print('the script ran')")
    with Watched(tmp_path, "--preload", "endless", "--nproc-per-node", "2", "train.py", env=env) as job:
        begun = tmp_path / "importing"
        wait_for(lambda: begun.exists() and begun.read_text(), "the import's beginning")

        job.fork_server().kill()

        assert job.wait() == 0
        assert begun.read_text() == "x", "it was imported again"
        assert job.stdout.count("the script ran") == 2
        logged = "the fork server ended while it imported; each worker starts as a fresh interpreter"
        assert job.logged_by_agent().count(logged) == 1


def test_a_killed_worker_store_restarts_the_group_with_a_new_one(tmp_path: Path) -> None:
    script(
        tmp_path,
        f"""{SAY}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(1)
dist.all_reduce(total)
say(f"generation {{GENERATION}} worker", os.getpid())
while GENERATION == 0:
    dist.all_reduce(torch.tensor(1))
    time.sleep(0.01)
dist.destroy_process_group()
print("reduced", int(total), "in generation", GENERATION)
""",
    )
    with Light(tmp_path, "--nproc-per-node", "2", "train.py") as job:
        first = wait_for(lambda: len(found := job.pids("generation 0 worker")) == 2 and found, "both workers")
        store = job.child("elaunch: worker store")

        store.kill()

        assert job.wait() == 0
        assert not is_alive(store)
        assert not any(is_alive(pid) for pid in first)
        assert len([line for line in job.logged_by_agent() if line.startswith("the worker store was killed")]) == 1
        assert job.stdout.count("reduced 2 in generation 1") == 2
        assert re.search("succeeded.* 1 of 3 restarts used", job.stderr)


def test_a_killed_guardian_is_replaced_also_where_the_kernel_refuses_pidfds(tmp_path: Path) -> None:
    without_pidfd = (sys.executable, no_pidfd.__file__, str(errno.EPERM))
    script(tmp_path, f"{SAY}{CHILDREN}\nsay('worker', os.getpid())\nwhile True: signal.pause()")
    with Light(tmp_path, "--nproc-per-node", "2", "train.py", prefix=without_pidfd) as job:
        wait_for(lambda: len(job.pids("worker")) == 2, "both workers")
        pids = [pid for name in ("worker", "sleep", "setsid", "daemon") for pid in job.pids(name)]
        assert len(pids) == 8
        old = job.guardian()

        old.kill()

        job.wait_for_output("the guardian was killed; starting another")
        assert job.guardian().pid != old.pid
        assert all(is_alive(pid) for pid in pids), "the workers have nothing to do with it"
        job.kill_agent()
        job.assert_nothing_is_left(pids)


def test_a_stopped_fork_server_does_not_hide_a_dead_worker(tmp_path: Path) -> None:
    script(tmp_path, WAITS_IN_GENERATION_0)
    with Light(tmp_path, "--nproc-per-node", "2", "--failure-grace", "0.5", "train.py") as job:
        first = wait_for(lambda: len(found := job.pids("worker")) == 2 and found, "both workers")
        old = job.fork_server()
        old.send_signal(signal.SIGSTOP)
        wait_for(lambda: old.status() == psutil.STATUS_STOPPED, "the fork server's stop")

        psutil.Process(first[0]).kill()

        assert job.wait() == 0
        assert job.stdout.count("succeeds in generation 1") == 2
        assert not is_alive(old)
        assert not any(is_alive(pid) for pid in first)
