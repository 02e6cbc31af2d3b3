"""Signals that ask for a stop after the current step. The second signal ends the process at once."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A scheduler signals every process of a job, and the agent forwards its own signal: one request may arrive twice.
_SAME_WISH_S = 1.0


class StopRequest:
    """Within the `with` block the first signal is only noted, in `signum` (0 until then).

    Each rank may get the signal in another step, so no rank acts alone: the ranks combine their notes and stop
    together, by SystemExit. If the block ends in another way, the signal is raised again for the handler that is active
    then. After an exception it is raised only if a Python handler gets it: otherwise it would end the process before
    the exception is reported. With several blocks in one program each notes the signal: any of them may have the loop
    that runs. `clock_s` is the time (monotonic); `end` is how a later signal ends the process.
    """

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] | None = None,
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        self.signum = 0
        self._pid = os.getpid()
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._noted_s = 0.0
        self._is_over = False
        self._clock_s = clock_s
        self._end = end or self._end_at_once

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        if self._before:
            _entered().append(self)
        return self

    def install(self) -> None:
        """Take the signals again, if a library has put its own handlers in place since the block was entered."""
        for number in self._before:
            if _request_of(signal.getsignal(number)) is None:
                signal.signal(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._before:
            _entered().remove(self)
        for number in self._before:
            # If another request has this signal, it gives it back when it is left.
            if _request_of(signal.getsignal(number)) in (self, None):
                self._give_back(number)
        if not self.signum or isinstance(error, SystemExit) or self._is_noted_elsewhere():
            return
        if error is None or callable(signal.getsignal(self.signum)):
            signal.raise_signal(self.signum)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child has inherited this handler, and the signal asks the child to end.
            self._end_at_once(signum)
            return
        if self._is_over:
            # A library has put back what it found when it began.
            self._give_back(signum)
            signal.raise_signal(signum)
            return
        now_s = self._clock_s()
        if self.signum and now_s - self._noted_s > _SAME_WISH_S:
            self._end(signum)
        for request in (self, *_entered()):
            if not request.signum:
                request.signum, request._noted_s = signum, now_s

    def _is_noted_elsewhere(self) -> bool:
        """Whether another request of this process has the signal now, and has noted it already."""
        other = _request_of(signal.getsignal(self.signum))
        return other is not None and not other._is_over and bool(other.signum)

    def _give_back(self, signum: int) -> None:
        handler = self._before.get(signum)
        while (request := _request_of(handler)) is not None and request._is_over:
            handler = request._before.get(signum)
        # None: the handler was not installed by Python.
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _end_at_once(self, signum: int) -> None:
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(signum)


@functools.cache
def _entered() -> list[StopRequest]:
    """Those of this process that have signals, and whose blocks are not left."""
    return []


def _request_of(handler: object) -> StopRequest | None:
    """The request whose handler this is; None if it is another one."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequest) else None


def free_signals() -> list[signal.Signals]:
    """The signals that ask for a stop. SIGUSR1 and SIGUSR2, which schedulers send before they kill, do if unhandled."""
    if threading.current_thread() is not threading.main_thread():
        return []
    notices = (signal.SIGUSR1, signal.SIGUSR2)
    return [*SIGNALS, *(notice for notice in notices if signal.getsignal(notice) is signal.SIG_DFL)]
