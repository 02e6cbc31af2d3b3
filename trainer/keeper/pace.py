"""How often a snapshot is taken: as often as possible at a given share of the time. Pure."""

from __future__ import annotations

import math

SHARE = 0.01
# The weight of the newest measurement in an average.
_NEWEST = 0.2


class Pace:
    """Decides after which steps this node wants a snapshot; `every` fixes their distance, None measures it."""

    def __init__(self, every: int | None, step: int, fresh: int = 0) -> None:
        """Begin after `step`. If it is not 0, a copy of it exists already.

        The first `fresh` copies are not measured, since they take the memory from the kernel.
        """
        self._every = every
        self._last = step
        self._step_s = 0.0
        self._snapshot_s = 0.0
        self._fresh = fresh
        # The first snapshot is always due: its cost is unknown until then, and without it a failure loses everything.
        self._none_yet = step == 0

    @property
    def is_fixed(self) -> bool:
        """Whether the distance is given."""
        return self._every is not None

    @property
    def every(self) -> int:
        """Steps between two snapshots, by the measurements so far."""
        if self._every is not None:
            return self._every
        if not self._snapshot_s or not self._step_s:
            return 1
        return max(1, math.ceil(self._snapshot_s / (SHARE * self._step_s)))

    def step_took(self, step_s: float, steps: int = 1) -> None:
        """Record the duration of a step, without its snapshot, or the mean of `steps`."""
        self._step_s = _average(self._step_s, step_s, 1 - (1 - _NEWEST) ** steps)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of `step` is due."""
        if step <= self._last:
            return False
        return (self._none_yet and step > 0) or step - self._last >= self.every

    def due_after(self, step: int, *, is_taken: bool) -> int:
        """After which step the next snapshot is due, where one of `step` is taken or not."""
        if is_taken:
            return step + self.every
        return self._last + (1 if self._none_yet else self.every)

    def covered(self, step: int) -> None:
        """A copy of `step` is as good as a snapshot."""
        self._last, self._none_yet = max(self._last, step), False

    def snapshot_took(self, step: int, snapshot_s: float) -> None:
        """Record how long the snapshot of `step` stopped the training."""
        self._last = step
        if self._fresh:
            self._fresh, self._none_yet = self._fresh - 1, False
            return
        # The first snapshot also allocates the memory; later ones do not.
        self._snapshot_s = snapshot_s if self._none_yet else _average(self._snapshot_s, snapshot_s)
        self._none_yet = False


def _average(old: float, new: float, weight: float = _NEWEST) -> float:
    return new if not old else (1 - weight) * old + weight * new
