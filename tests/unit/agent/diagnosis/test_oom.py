"""agent.diagnosis.oom: which kill the kernel's counters tell of, and who holds how much."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.diagnosis import oom
from elaunch.agent.diagnosis.oom import KernelLog, OutOfMemoryWatch, are_counted, held_text
from tests.harness import DEADLINE_S

COUNTED = "its memory cgroup counted an out-of-memory kill at that time"
# The pid of no process: the kernel log says nothing about it.
PID = -1


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    path = tmp_path / "memory.events"
    count(path, 3)
    return path


def count(path: Path, kills: int) -> None:
    path.write_text(f"low 0\nhigh 0\nmax 9\noom 9\noom_kill {kills}\noom_group_kill 0\n")


def test_two_processes_that_are_killed_at_once_are_two_kills(counter: Path) -> None:
    watch = OutOfMemoryWatch(KernelLog(), [counter])
    before = watch.word_on(PID, 10.0)
    count(counter, 5)

    said = [watch.word_on(PID, now_s) for now_s in (20.0, 20.1, 20.2)]

    assert before == ""
    assert said == [COUNTED, COUNTED, ""]


def test_a_counter_says_that_there_was_no_kill_and_its_absence_says_nothing(counter: Path, tmp_path: Path) -> None:
    old = tmp_path / "memory.oom_control"
    old.write_text("oom_kill_disable 0\nunder_oom 0\n")

    assert are_counted([counter])
    assert not are_counted([])
    assert not are_counted([old, tmp_path / "missing"])


@pytest.fixture
def family() -> Iterator[int]:
    """A process that holds 40 MiB and has a child that holds 60 MiB."""
    child = f"import time; x = b'x' * {60 << 20}; print('ready', flush=True); time.sleep(600)"
    code = f"import subprocess, sys; x = b'x' * {40 << 20}; subprocess.run([sys.executable, '-Sc', {child!r}])"
    # A group of its own: both are ended together.
    process = subprocess.Popen([sys.executable, "-Sc", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    yield process.pid
    os.killpg(process.pid, 9)
    process.wait(DEADLINE_S)
    process.stdout.close()


def held(text: str) -> float:
    found = re.fullmatch(r"rank 5 held ([\d.]+) MiB", text)
    assert found, text
    return float(found[1])


def test_a_worker_holds_what_its_children_hold_and_a_busy_host_is_not_waited_for(
    family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom, "_LOOK_S", DEADLINE_S)
    whole = held(held_text({5: family, 6: 0}))
    monkeypatch.setattr(oom, "_LOOK_S", -1.0)
    own = held(held_text({5: family}))

    assert 100 < whole < 160
    assert 40 < own < 60
