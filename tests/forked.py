"""Forked children of a test: none goes on as a second pytest, outlives its test, or is waited for without a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from tests.harness import DEADLINE_S, wait_for

# What a child that hangs has to write its stacks, before it is killed.
_STACKS_S = 10.0


class Child:
    """Runs `act` in a forked child, which then ends; use it as a context manager, whose end kills the child.

    The child ends with code 0, or with code 1 and a traceback on stderr if `act` raises. It has none of the threads of
    this process, so `act` must do nothing that waits for one of them.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _end_after(act)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def code(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its end; the `code`. A child that has not ended by then prints its stacks, and the test fails."""
        try:
            wait_for(lambda: self.code is not None, f"the end of forked child {self.pid}", deadline_s)
        except AssertionError:
            # pytest's faulthandler prints them.
            self._signal(signal.SIGABRT)
            with contextlib.suppress(AssertionError):
                wait_for(lambda: self.code is not None, "its stacks", _STACKS_S)
            self.kill()
            raise
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """Kill it unless it has ended, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        wait_for(lambda: self.code is not None, f"forked child {self.pid}, which was killed")

    def _signal(self, signum: signal.Signals) -> None:
        # Until its end is waited for, no other process gets its pid.
        if self.code is None:
            os.kill(self.pid, signum)


def _end_after(act: Callable[[], object]) -> None:
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
