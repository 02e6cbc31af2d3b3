"""Ten restarts of a worker with children: nothing of an older generation lives, and nothing adds up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.census import Holdings, holdings, shared_memory_of
from tests.faults.processes import CHILDREN, LIGHT, SAY, Watched, is_alive
from tests.harness import RUN_LIMIT_S, script, slow, wait_for

RESTARTS = 10

# The worker reports a step, since ten generations without progress would end the job.
CRASHES_ON_DEMAND = f"""{SAY}{CHILDREN}
os.write(int(os.environ["ELAUNCH_LINK"]), b'{{"event": "progress", "step": %d}}\\n' % GENERATION)
say(f"generation {{GENERATION}} worker", os.getpid())
while not os.path.exists(f"go{{GENERATION}}"):
    time.sleep(0.005)
if GENERATION < {RESTARTS}:
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


def zombies_of(*parents: psutil.Process) -> list[int]:
    found = []
    for child in (child for parent in parents for child in parent.children()):
        # It may be reaped meanwhile.
        with suppress(psutil.NoSuchProcess):
            found += [child.pid] if child.status() == psutil.STATUS_ZOMBIE else []
    return found


def holds(*processes: psutil.Process) -> list[Holdings]:
    """What they hold, but for what a generation that lasts on a busy machine needs more."""
    return [holdings(each.pid).of_each_generation for each in processes]


@pytest.mark.parametrize("how", [LIGHT, slow(("--no-preload",))], ids=["forked", "no-preload"])
def test_ten_restarts_leave_no_process_no_descriptor_no_thread_no_file(tmp_path: Path, how: tuple[str, ...]) -> None:
    script(tmp_path, CRASHES_ON_DEMAND)
    shared_before = {path.name for path in Path("/dev/shm").iterdir()}
    names = ("sleep", "setsid", "daemon")
    # Not their pids, which other processes may get.
    older: list[psutil.Process] = []
    first: list[Holdings] = []
    with Watched(tmp_path, *how, "--nproc-per-node", "2", "--max-restarts", str(RESTARTS), "train.py") as job:
        agent, template = psutil.Process(job.process.pid), job.fork_server()

        for generation in range(RESTARTS + 1):
            wait_for(
                lambda n=generation: len(job.pids(f"generation {n} worker")) == 2, f"generation {generation}'s workers"
            )
            pids = job.pids(f"generation {generation} worker") + [p for n in names for p in job.pids(n)[-2:]]
            now = [psutil.Process(pid) for pid in pids]
            assert all(map(is_alive, now))
            assert not [each for each in older if is_alive(each)], f"alive in generation {generation}"
            wait_for(lambda: not zombies_of(agent, template), "zombies are reaped")
            wait_for(lambda: job.child("elaunch: worker store"), "the worker store")
            # A closing pipe may still need a moment.
            first.extend([] if first else holds(agent, template))
            wait_for(
                lambda: holds(agent, template) == first,
                f"agent and fork server hold {first} again in generation {generation}",
            )
            older += now
            (tmp_path / f"go{generation}").touch()

        assert job.wait() == 0
        assert f"generation {RESTARTS}: 2 workers" in job.stderr, "the faults did not strike"
        assert len(older) == len(set(older)) == 8 * (RESTARTS + 1)
        job.assert_nothing_is_left(older)
        assert not list(job.tmp.iterdir())
        assert not set(shared_memory_of(each.pid for each in older)) - shared_before


SHARES_MEMORY = """
import multiprocessing as mp, os, signal
from multiprocessing.shared_memory import SharedMemory

if os.environ["ELAUNCH_GENERATION"] == "0":
    memory = SharedMemory(create=True, size=64)
    lock = mp.get_context("spawn").Lock()
    print("shared", memory.name, lock._semlock.name.lstrip("/"), os.getpid(), flush=True)
    signal.pause()
print("again")
"""


@pytest.mark.parametrize("whom", ["worker", slow("agent")])
def test_what_a_killed_worker_has_shared_is_removed_by_its_own_tracker(tmp_path: Path, whom: str) -> None:
    script(tmp_path, SHARES_MEMORY)
    with Watched(tmp_path, *LIGHT, "train.py") as job:
        found = job.wait_for_output(r"^shared (\S+) (\S+) (\d+)$")
        names = [found[1], f"sem.{found[2]}"]
        assert all(Path("/dev/shm", name).exists() for name in names)

        if whom == "agent":
            job.kill_agent()
        else:
            os.kill(int(found[3]), signal.SIGKILL)
            assert job.wait() == 0, job.output

        job.assert_nothing_is_left()
    assert not [name for name in names if Path("/dev/shm", name).exists()]


# Whoever started the job inherits what its processes leave unreaped, as does process 1 of a container.
INHERITS = """
import ctypes, os, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
code = subprocess.run([sys.executable, "-m", "elaunch", *sys.argv[1:]]).returncode
try:
    left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
except ChildProcessError:
    left = None
sys.exit(f"left unreaped: {left}" if left else code)
"""


def test_a_jobs_last_workers_are_reaped_before_it_ends(tmp_path: Path) -> None:
    script(tmp_path, "")
    command = (sys.executable, "-c", INHERITS, *LIGHT, "--nproc-per-node", "2", "train.py")

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_LIMIT_S)

    assert done.returncode == 0, done.stderr
