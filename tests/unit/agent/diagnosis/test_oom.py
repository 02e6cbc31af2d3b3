"""agent.diagnosis.oom: which kills the kernel's counters show."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.agent.diagnosis.oom import KernelLog

COUNTED = "its memory cgroup counted an out-of-memory kill at that time"
# The pid of no process: the kernel log has nothing about it.
PID = -1


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "memory.events"
    count(path, 3)
    return path


def count(path: Path, kills: int) -> None:
    path.write_text(f"low 0\nhigh 0\nmax 9\noom 9\noom_kill {kills}\noom_group_kill 0\n")


def test_two_processes_that_are_killed_at_once_are_two_kills(counter: Path) -> None:
    watch = KernelLog([counter])
    before = watch.oom_text(PID, 10.0)
    count(counter, 5)

    texts = [watch.oom_text(PID, now_s) for now_s in (20.0, 20.1, 30.0)]

    assert before == ""
    assert texts == [COUNTED, COUNTED, ""]


def test_a_counter_shows_that_there_was_no_kill_and_its_absence_shows_nothing(counter: Path, tmp_path: Path) -> None:
    old = tmp_path / "memory.oom_control"
    old.write_text("oom_kill_disable 0\nunder_oom 0\n")

    assert KernelLog([counter]).counts_kills
    assert not KernelLog([]).counts_kills
    assert not KernelLog([old, tmp_path / "missing"]).counts_kills
