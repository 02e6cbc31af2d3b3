"""agent.diagnosis.investigate: answers about this host, with a limit of time."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.agent.diagnosis import investigate
from elaunch.agent.diagnosis.causes.cause import Facts
from elaunch.agent.diagnosis.investigate import Investigator
from elaunch.agent.diagnosis.oom import KernelLog
from elaunch.rendezvous.types import Failure, FailureKind
from tests.harness import DEADLINE_S, wait_for

NOW = Failure(FailureKind.EXCEPTION, 0, "a-1", "a", 0, 0, 17, 1, "raised ValueError: bad", exception="ValueError")


def facts_about(failure: Failure) -> Facts:
    found: list[dict[int, Facts]] = []
    Investigator(KernelLog(), []).look_into({3: failure}, found.append)
    return wait_for(lambda: found, "the facts")[0].get(3, Facts())


def no_room(path: Path) -> Failure:
    said = f"[Errno 28] No space left on device: '{path}'"
    stack = f'Traceback (most recent call last):\n  File "/u/t.py", line 1, in f\nOSError: {said}'
    return replace(NOW, exception="OSError", message=f"raised OSError: {said}", traceback=stack)


def test_a_failure_that_asks_nothing_is_answered_at_once_and_without_a_thread() -> None:
    found: list[dict[int, Facts]] = []
    before = set(threading.enumerate())

    Investigator(KernelLog(), []).look_into({0: NOW}, found.append)
    Investigator(KernelLog(), []).look_into({}, found.append)

    assert found == [{}, {}]
    assert set(threading.enumerate()) <= before


def test_the_space_of_a_path_that_is_not_there_is_that_of_the_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(investigate, "_LIMIT_S", DEADLINE_S)
    missing = tmp_path / "no" / "such" / "model.pt"

    (space,) = facts_about(no_room(missing)).spaces.values()

    said = os.statvfs(tmp_path)
    assert space.total == said.f_blocks * said.f_frsize
    assert os.path.ismount(space.mount)
    assert tmp_path.is_relative_to(space.mount)


def test_a_look_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(investigate, "_LIMIT_S", 0.1)
    monkeypatch.setattr(investigate, "_space", lambda path: hangs.wait(300))

    began_s = time.monotonic()
    facts = facts_about(no_room(tmp_path))
    took_s = time.monotonic() - began_s
    hangs.set()

    assert facts.spaces == {}
    assert took_s < 60
