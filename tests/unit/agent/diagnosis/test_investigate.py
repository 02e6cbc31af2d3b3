"""agent.workers.investigator: answers about this host, with a limit of time."""

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


@pytest.mark.parametrize("file", ["src/net.py", "src/sub/net.py", "src.py"])
def test_a_module_is_found_in_the_current_folder_and_above_the_script_but_not_in_a_folder_of_data(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(investigate, "_LIMIT_S", DEADLINE_S)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "src" / "sub").mkdir(parents=True)
    (tmp_path / "src" / "data.json").touch()
    stack = f'Traceback (most recent call last):\n  File "{tmp_path}/scripts/t.py", line 1, in f\n'
    said = "ModuleNotFoundError: No module named 'src'"
    missing = replace(NOW, exception="ModuleNotFoundError", traceback=stack + said)
    monkeypatch.chdir(tmp_path / "elsewhere")

    before = facts_about(missing).folder
    (tmp_path / file).touch()
    above = facts_about(missing).folder
    monkeypatch.chdir(tmp_path)
    here = facts_about(replace(missing, traceback=missing.traceback.replace(str(tmp_path), "/nowhere"))).folder

    assert (before, above, here) == ("", str(tmp_path), str(tmp_path))
    # In a folder like /tmp anybody may have put it.
    tmp_path.chmod(0o1777)
    assert facts_about(missing).folder == ""
    tmp_path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / file, 65534, 65534)
        assert facts_about(missing).folder == ""
