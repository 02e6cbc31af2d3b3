"""Signals as a wish to stop after the current step; the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A scheduler signals every process of a job, and the agent passes its own signal on: that is one wish, told twice.
_SAME_WISH_S = 1.0


class StopRequest:
    """Within the `with` block the first signal is only noted, in `signum` (0 until then).

    Each rank may be told at another step, so nobody acts on its own note: the ranks add theirs up and stop together, by
    SystemExit. Where the block ends otherwise, the signal is sent again, to whoever handles it then; after an exception
    not where it would end the process, which is to tell of that. `clock_s` and `end` are the time (monotonic) and the
    way a later signal ends the process.
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
        self._before: list[tuple[signal.Signals, Any]] = []
        self._noted_s = 0.0
        self._clock_s = clock_s
        self._end = end or self._end_at_once

    def __enter__(self) -> StopRequest:
        self._before = [(number, signal.signal(number, self._note)) for number in self._signals]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before:
            # None: it was none of Python's.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if not self.signum or isinstance(error, SystemExit):
            return
        if error is None or callable(signal.getsignal(self.signum)):
            signal.raise_signal(self.signum)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child that was forked with our handlers, and is asked to end.
            self._end_at_once(signum)
            return
        now_s = self._clock_s()
        if not self.signum:
            self.signum, self._noted_s = signum, now_s
        elif now_s - self._noted_s > _SAME_WISH_S:
            self._end(signum)

    def _end_at_once(self, signum: int) -> None:
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(signum)
