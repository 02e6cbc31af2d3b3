"""Many restarts in a row leave no process, descriptor, thread or file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import CHILDREN, SAY, Watched, is_alive
from tests.harness import LIGHT, script, slow, wait_for

# What the agent has open of each worker once a generation has run for some seconds, by kind. On a busy machine some
# generations of a storm do, and others do not.
OF_LONG_GENERATIONS = ("/proc//stat", "/proc//schedstat")


def holdings(pid: int) -> dict[str, int]:
    """The process's descriptors by kind and its threads, but for what a generation that lasts needs more."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            # All sockets ("socket:[4711]") are one kind, and all pipes. Each file is a kind of its own, but those of a
            # worker in /proc.
            kind = re.sub(r":\[\d+\]$|(?<=^/proc/)\d+", "", str(link.readlink()))
            if kind not in OF_LONG_GENERATIONS:
                kinds[kind] += 1
    kinds["threads"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
    return dict(kinds)


def shared_memory_of(pids: Iterable[int]) -> list[str]:
    """The names in /dev/shm that belong to elaunch: those with its prefix, and those made by one of `pids`.

    The workers' memory is left out, since other tests' jobs have one too. `Watched.memory_dirs` has this job's own.
    """
    wanted = {str(pid) for pid in pids}
    names = [path.name for path in Path("/dev/shm").iterdir()]
    names = [name for name in names if not re.fullmatch(r"elaunch_[0-9a-f]+_memory", name)]
    return [name for name in names if name.startswith("elaunch") or wanted & set(re.split(r"[^0-9]+", name))]


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


def holds(*processes: psutil.Process) -> list[dict[str, int]]:
    return [holdings(each.pid) for each in processes]


@pytest.mark.parametrize("how", [LIGHT, slow(("--no-preload",))], ids=["forked", "no-preload"])
def test_ten_restarts_leave_no_process_no_descriptor_no_thread_no_file(tmp_path: Path, how: tuple[str, ...]) -> None:
    script(tmp_path, CRASHES_ON_DEMAND)
    shared_before = {path.name for path in Path("/dev/shm").iterdir()}
    names = ("sleep", "setsid", "daemon")
    # Not their pids, which other processes may get.
    older: list[psutil.Process] = []
    first: list[dict[str, int]] = []
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
