"""Forked children of tests: whatever one does, its test ends, and says what happened."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest

from tests.forked import Child
from tests.harness import wait_for


def hangs() -> None:
    time.sleep(3600)


def raises() -> None:
    raise ValueError("asked for by the test")


def is_gone(pid: int) -> bool:
    """Whether this process has no such child any more, not even one that has ended."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


@pytest.mark.parametrize("act", [raises, lambda: pytest.fail("asked for by the test"), lambda: exit("asked for by")])
def test_a_child_that_raises_has_code_1_and_says_why(act: object, capfd: pytest.CaptureFixture[str]) -> None:
    with Child(act) as child:  # type: ignore[arg-type]
        assert child.end() == 1

    assert "asked for by" in capfd.readouterr().err


def test_a_child_that_hangs_is_named_prints_its_stacks_is_killed_and_fails_its_test(tmp_path: Path) -> None:
    def hangs_here() -> None:
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.enable(file)
            (tmp_path / "begun").touch()
            hangs()

    with Child(hangs_here) as child:
        wait_for((tmp_path / "begun").exists, "the child")
        with pytest.raises(AssertionError, match=rf"not within 0\.2 s: the end of forked child {child.pid}$"):
            child.end(0.2)

    assert is_gone(child.pid)
    assert "in hangs_here" in (tmp_path / "stacks").read_text()


def test_a_child_that_its_test_does_not_wait_for_is_killed_in_the_end() -> None:
    with Child(hangs) as child:
        assert child.code is None

    assert child.code == -signal.SIGKILL
    assert is_gone(child.pid)
