"""agent.diagnosis.investigate: facts of this host, with a limit of time, and kills that the kernel counts."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.agent.diagnosis import investigate
from elaunch.agent.diagnosis.causes.cause import Facts
from elaunch.agent.diagnosis.investigate import KernelLog, gather_facts
from elaunch.rendezvous.types import Failure, FailureKind
from tests.harness import DEADLINE_S, wait_for

NOW = Failure(FailureKind.EXCEPTION, 0, "a-1", "a", 0, 0, 17, 1, "raised ValueError: bad", exception="ValueError")
NO_ROOM = replace(NOW, exception="OSError", message="raised OSError: [Errno 28] No space left on device")
COUNTED = "its memory cgroup counted an out-of-memory kill at that time"
# The pid of no process: the kernel log has nothing about it.
PID = -1


def facts_about(failure: Failure) -> Facts:
    found: list[Facts] = []
    gather_facts([failure], KernelLog([]), found.append)
    return wait_for(lambda: found, "the facts")[0]


def test_a_failure_that_no_disk_explains_has_its_facts_immediately_and_without_a_thread() -> None:
    found: list[Facts] = []
    before = set(threading.enumerate())

    gather_facts([NOW], KernelLog([]), found.append)

    assert [facts.shm for facts in found] == [None]
    assert set(threading.enumerate()) <= before


def test_the_shared_memory_is_probed_where_it_may_be_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(investigate, "_LIMIT_S", DEADLINE_S)

    shm = facts_about(NO_ROOM).shm

    status = os.statvfs("/dev/shm")
    assert shm
    assert (shm.mount, shm.total) == ("/dev/shm", status.f_blocks * status.f_frsize)


@pytest.mark.parametrize("file", ["src/net.py", "src/sub/net.py", "src.py"])
def test_a_missing_module_is_found_above_the_script_but_not_in_data_or_where_others_write(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(investigate, "_LIMIT_S", DEADLINE_S)
    monkeypatch.chdir("/")
    (tmp_path / "src" / "sub").mkdir(parents=True)
    (tmp_path / "src" / "data.json").touch()
    missing = replace(
        NOW,
        exception="ModuleNotFoundError",
        message="raised ModuleNotFoundError: No module named 'src'",
        traceback=f'Traceback (most recent call last):\n  File "{tmp_path}/scripts/t.py", line 1, in f\n'
        "ModuleNotFoundError: No module named 'src'",
    )

    assert facts_about(missing).folder == ""
    (tmp_path / file).touch()
    assert facts_about(missing).folder == str(tmp_path)
    tmp_path.chmod(0o777)
    assert facts_about(missing).folder == ""


def test_a_probe_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(investigate, "_LIMIT_S", 0.1)
    monkeypatch.setattr(investigate, "_spaces", lambda mounts: (hangs.wait(300), ())[1])

    began_s = time.monotonic()
    facts = facts_about(NO_ROOM)
    took_s = time.monotonic() - began_s
    hangs.set()

    assert facts.shm is None
    assert took_s < 60


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

    assert KernelLog([counter]).kills_counted() is not None
    assert KernelLog([]).kills_counted() is None
    assert KernelLog([old, tmp_path / "missing"]).kills_counted() is None
