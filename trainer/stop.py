"""SIGTERM and SIGINT as a wish to stop after the current step; the second one ends the process at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within the `with` block the first signal is only noted, in `signum` (0 until then).

    Each rank may be told at another step, so nobody acts on its own note: the ranks add theirs up and stop together.
    """

    def __init__(self) -> None:
        self.signum = 0

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        _end_at_once()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        _end_at_once()


def _end_at_once() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
