"""SIGKILL of the agent: whatever the job is doing then, soon no process and no file of the job is left."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.processes import CHILDREN, SAY, Light, Watched, is_alive
from tests.harness import DEADLINE_S, LIGHT, script, wait_for
from tests.standin import WITHOUT_TORCH

WITH_CHILDREN = f"""{SAY}{CHILDREN}
say("worker", os.getpid())
while True:
    signal.pause()
"""

NAMES = ("worker", "sleep", "setsid", "daemon")


def logged_pids(job: Watched, *names: str, each: int) -> list[int]:
    """The pids that the workers logged, once all are there and alive."""
    wait_for(lambda: all(len(job.pids(name)) == each for name in names), f"{each} of each of {names}")
    pids = [pid for name in names for pid in job.pids(name)]
    assert all(is_alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("how", [LIGHT, ("--no-preload",)], ids=["forked", "no-preload"])
def test_children_of_workers_die_with_the_agent(tmp_path: Path, how: tuple[str, ...]) -> None:
    script(tmp_path, WITH_CHILDREN)
    with Watched(tmp_path, *how, "--nproc-per-node", "2", "train.py", env=WITHOUT_TORCH) as job:
        pids = logged_pids(job, *NAMES, each=2)
        assert job.run_dirs(), "there is no run directory to remove"

        job.kill_agent()

        job.assert_nothing_is_left(pids)


def test_the_guardian_reports_a_killed_agent_on_stderr_and_in_the_timeline(tmp_path: Path) -> None:
    script(tmp_path, WITH_CHILDREN)
    with Light(tmp_path, "--log-dir", "logs", "--nproc-per-node", "2", "train.py") as job:
        logged_pids(job, *NAMES, each=2)

        job.kill_agent()

        who = f"elaunch itself (pid {job.process.pid}) died on {socket.gethostname()} in generation 0"
        died = f"{who}, by a signal such as kill -9, or a crash of its own; its 2 workers there were ended"
        job.assert_nothing_is_left()
        # The line may still be in the pipe.
        wait_for(lambda: job.logged_by_agent()[-1] == died, "the guardian's line")
    event = json.loads(next((tmp_path / "logs").glob("*_*/timeline.jsonl")).read_text().splitlines()[-1])
    assert (event["event"], event["generation"], event["workers"], event["reason"]) == ("agent_died", 0, 2, died)


def test_what_a_killed_agent_had_is_gone_within_a_second(tmp_path: Path) -> None:
    """A busy machine may need longer, so one kill of several has to show it."""
    script(tmp_path, WITH_CHILDREN)
    took_s: list[float] = []
    while not took_s or (min(took_s) > 1 and len(took_s) < 10):
        with Light(tmp_path, "--nproc-per-node", "2", "train.py") as job, ExitStack() as stack:
            pids = logged_pids(job, *NAMES, each=2)
            ends = [os.pidfd_open(pid) for pid in pids]
            for end in ends:
                stack.callback(os.close, end)
            killed_at_s = job.kill_agent()
            # A look at all processes would itself take a part of the second.
            for end in ends:
                assert select.select([end], [], [], DEADLINE_S)[0], f"still there: {[p for p in pids if is_alive(p)]}"
            took_s.append(time.monotonic() - killed_at_s)
            job.assert_nothing_is_left(pids)

    assert min(took_s) <= 1


def test_what_an_agent_killed_together_with_its_guardian_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script(tmp_path, f"{SAY}\nsay('worker', os.getpid())\nwhile True: signal.pause()")
    options = ("--nproc-per-node", "1", "train.py")
    with Light(tmp_path, *options) as living:
        logged_pids(living, "worker", each=1)
        kept = [*living.run_dirs(), *living.memory_dirs()]
        with Light(tmp_path, *options) as killed:
            logged_pids(killed, "worker", each=1)
            left = [path for path in (*killed.run_dirs(), *killed.memory_dirs()) if path not in kept]
            guardian = killed.guardian()
            # Stop the agent first: it would start another guardian.
            killed.signal(signal.SIGSTOP)
            guardian.kill()
            killed.kill_agent()
            assert len(left) == len(kept) == 2
            # The agent of another test may have removed what is in the memory of the host.
            assert all(path.exists() for path in left if path.parent == killed.tmp), "it was not to be removed yet"

            with Light(tmp_path, *options) as following:
                logged_pids(following, "worker", each=1)
                wait_for(lambda: not any(path.exists() for path in left), "the removal")

        assert all(path.exists() for path in kept), "its agent lives"
