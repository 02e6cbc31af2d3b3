"""How long a worker's steps take, from what its agent sees at its looks once a second, and when somebody asks.

A look costs an append at most, and nothing is computed before somebody asks.
"""

from __future__ import annotations

from collections import deque

# A step's time is a mean over this many looks at which the step had moved: ten seconds, or ten slow steps.
_LOOKS = 10
# A question comes at any moment. A step that ends between two looks 20 ms apart has not taken 20 ms.
_APART_S = 0.5


class StepTimes:
    """When one worker's step was seen to move, and when it was last seen to report."""

    def __init__(self) -> None:
        self._moves: deque[tuple[float, int]] = deque(maxlen=_LOOKS + 1)
        self._reports = 0
        self.reported_s: float | None = None

    def look(self, now_s: float, step: int, reports: int) -> None:
        """Note what the worker has reported until now: its newest step (-1 for none), and how many reports."""
        if reports == self._reports:
            return
        self._reports, self.reported_s = reports, now_s
        if step < 0 or (self._moves and self._moves[-1][1] == step):
            return
        if self._moves and step < self._moves[-1][1]:
            # It goes over these steps again.
            self._moves.clear()
        if self._moves and now_s - self._moves[-1][0] < _APART_S:
            return
        self._moves.append((now_s, step))

    @property
    def step_s(self) -> float | None:
        """Seconds per step, None before the second move."""
        if len(self._moves) < 2:
            return None
        (from_s, first), (to_s, last) = self._moves[0], self._moves[-1]
        return (to_s - from_s) / (last - first)
