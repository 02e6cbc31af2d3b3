"""elaunch.process_identity: a successor can tell whether an agent of the same host is dead, and of no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from elaunch.process_identity import is_dead_here, this_process
from tests.harness import DEADLINE_S, wait_for

WORD = "from elaunch.process_identity import this_process; print(this_process(), flush=True); input()"


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that lives until its stdin is closed, and its name."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", WORD], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def test_a_process_that_lives_is_not_dead(other: tuple[subprocess.Popen[str], str]) -> None:
    _, name = other

    assert name != this_process()
    assert not is_dead_here(name)
    assert not is_dead_here(this_process())


def test_a_zombie_is_dead(other: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other
    process.kill()

    wait_for(lambda: is_dead_here(name), "the killed process to be dead, though no process has waited for it")
    assert process.returncode is None


def test_another_process_that_got_the_same_pid_is_not_taken_for_it() -> None:
    place, _, started = this_process().rpartition(":")

    assert is_dead_here(f"{place}:{int(started) - 1}")


def test_a_process_elsewhere_counts_as_alive() -> None:
    boot, namespace, pid, started = this_process().rsplit(":", 3)

    assert not is_dead_here(f"other-boot:{namespace}:{pid}:{int(started) - 1}")
    assert not is_dead_here(f"{boot}:pid-1:{pid}:{int(started) - 1}")


def test_what_is_no_name_of_a_process_is_not_dead() -> None:
    for name in ("", ":", "::", "a", "a:b", "a:b:c", f"{this_process()}:x", "unknown:1:2"):
        assert not is_dead_here(name), name
