"""agent.workers.slow_monitor: facts about real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elaunch.agent.workers import slow_monitor
from elaunch.agent.workers.slow_monitor import read_traits
from tests.harness import DEADLINE_S, wait_for

SPIN = "while True: pass"
LOADER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{SPIN}'])"


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """0 sleeps; 1 has a nice value and one CPU; 2 has a child that works."""
    monkeypatch.setattr(slow_monitor, "_SPAN_S", 0.3)
    programs = ("input()", "input()", LOADER)
    workers = [subprocess.Popen([sys.executable, "-c", p], stdin=subprocess.PIPE, process_group=0) for p in programs]
    os.sched_setaffinity(workers[1].pid, {min(os.sched_getaffinity(0))})
    os.setpriority(os.PRIO_PROCESS, workers[1].pid, 17)
    wait_for(lambda: slow_monitor.linux.children(workers[2].pid), "a child")
    yield {rank: worker.pid for rank, worker in enumerate(workers)}
    for worker in workers:
        os.killpg(worker.pid, 9)
        worker.communicate(timeout=DEADLINE_S)


def test_the_facts_are_those_of_each_process(pids: dict[int, int]) -> None:
    # On a busy host the child may not come to a CPU at once.
    traits = wait_for(
        lambda: traits if (traits := read_traits({**pids, 3: 2**22 + 1}))[2].children else None, "a child that works"
    )

    assert traits.keys() == pids.keys(), "a process that is gone has none"
    assert (traits[1].cpus, traits[1].nice) == (1, 17)
    assert (traits[0].cpus, traits[0].nice) == (len(os.sched_getaffinity(0)), os.nice(0))
    assert traits[0].children == 0
    assert all(0 <= found.delayed <= 1 and found.throttled == 0 for found in traits.values())
