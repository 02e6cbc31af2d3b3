"""agent.workers.build_locks: the lock of a torch extension's build, with torch's own code for it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from elaunch.agent.workers import held_files
from elaunch.agent.workers.build_locks import free_locks, remove_free
from tests.harness import DEADLINE_S


def _baton() -> str:
    """torch's file, without an import of torch."""
    torch = find_spec("torch")
    assert torch
    assert torch.origin
    return str(Path(torch.origin).parent / "utils" / "file_baton.py")


BUILD = """
import runpy, sys, time
baton = runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2])
assert baton.try_acquire()
print("builds", flush=True)
time.sleep(600)
"""


def look(root: Path, say: Callable[[str], None]) -> None:
    remove_free(free_locks(str(root), say), say)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "py311_cpu" / "fused_adam"
    folder.mkdir(parents=True)
    return folder / "lock"


@pytest.fixture
def builder(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BUILD, _baton(), str(lock)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"builds\n"
        yield process
        process.kill()


def test_the_lock_of_a_builder_that_lives_stays(tmp_path: Path, lock: Path, builder: subprocess.Popen[bytes]) -> None:
    said: list[str] = []

    look(tmp_path, said.append)

    assert builder.poll() is None
    assert lock.exists()
    assert said == []


def test_the_lock_of_a_builder_that_was_killed_is_removed_and_named(
    tmp_path: Path, lock: Path, builder: subprocess.Popen[bytes]
) -> None:
    said: list[str] = []
    builder.kill()
    builder.wait(DEADLINE_S)
    assert lock.exists()

    look(tmp_path, said.append)

    assert not lock.exists()
    (sentence,) = said
    assert sentence.startswith(f"removed {lock}: ")


def test_a_lock_on_a_disk_that_hosts_share_is_only_named_and_only_if_it_is_old(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    lock.touch()
    monkeypatch.setattr(held_files, "_LOCAL", frozenset())

    look(tmp_path, said.append)
    assert said == []

    hour_ago_s = time.time() - 3600
    os.utime(lock, (hour_ago_s, hour_ago_s))
    look(tmp_path, said.append)

    assert lock.exists()
    (sentence,) = said
    assert "60 minutes old" in sentence


def test_a_lock_on_a_disk_that_grants_no_leases_is_named_too(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    lock.touch()
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    monkeypatch.setattr(held_files, "_LOCAL", frozenset())

    def as_on_nfs(_fd: int, _operation: int, _argument: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", as_on_nfs)

    look(tmp_path, said.append)

    assert len(said) == 1


def test_the_lock_of_a_new_builder_stays_where_another_agent_has_just_removed_the_old_one(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders: list[int] = []
    looks: list[int] = []
    ask = fcntl.fcntl

    def ask_late(fd: int, operation: int, argument: int) -> int:
        if (operation, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            looks.append(fd)
            if len(looks) == 2:
                lock.unlink()
                builders.append(os.open(lock, os.O_CREAT | os.O_EXCL))
        return ask(fd, operation, argument)

    lock.touch()
    monkeypatch.setattr(fcntl, "fcntl", ask_late)

    look(tmp_path, lambda sentence: pytest.fail(sentence))

    assert builders
    assert lock.exists()
    os.close(builders[0])


def test_a_file_that_is_no_lock_of_torchs_stays(tmp_path: Path, lock: Path) -> None:
    lock.write_text("a program's own")

    look(tmp_path, lambda sentence: pytest.fail(sentence))

    assert lock.exists()
