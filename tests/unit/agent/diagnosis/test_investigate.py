"""agent.diagnosis.investigate: what is found out about this host, with a limit of time."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.agent.diagnosis import investigate
from elaunch.agent.diagnosis.causes.cause import Facts
from elaunch.agent.diagnosis.investigate import gather_facts
from elaunch.agent.diagnosis.oom import KernelLog
from elaunch.rendezvous.types import Failure, FailureKind
from tests.harness import DEADLINE_S, wait_for

NOW = Failure(FailureKind.EXCEPTION, 0, "a-1", "a", 0, 0, 17, 1, "raised ValueError: bad", exception="ValueError")
NO_ROOM = replace(NOW, exception="OSError", message="raised OSError: [Errno 28] No space left on device")


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
