"""How often a snapshot is taken: as often as it costs no more than a given share of the time. Pure."""

from __future__ import annotations

import math

SHARE = 0.01
# Weight of the newest measurement in an average.
_NEWEST = 0.2


class Pace:
    """Decides after which steps this node wants a snapshot; `every` fixes their distance, None measures it."""

    def __init__(self, every: int | None, step: int) -> None:
        """Begin after `step`, of which there is a copy already if it is not 0."""
        self._every = every
        self._last = step
        self._step_s = 0.0
        self._snapshot_s = 0.0
        # What a first snapshot costs is known only afterwards; without one, all would be lost with the workers.
        self._none_yet = step == 0

    @property
    def every(self) -> int:
        """Steps between two snapshots, as far as it is known now."""
        if self._every is not None:
            return self._every
        if not self._snapshot_s or not self._step_s:
            return 1
        return max(1, math.ceil(self._snapshot_s / (SHARE * self._step_s)))

    def step_took(self, step_s: float) -> None:
        """A step took so long, without what a snapshot took."""
        self._step_s = _average(self._step_s, step_s)

    def is_due(self, step: int) -> bool:
        """Whether there is to be a snapshot of `step`."""
        if step <= self._last:
            return False
        return (self._none_yet and step > 0) or step - self._last >= self.every

    def snapshot_took(self, step: int, snapshot_s: float) -> None:
        """The snapshot of `step` stopped the training for so long."""
        self._last = step
        # The first one also takes the memory from the kernel, which the others do not.
        self._snapshot_s = snapshot_s if self._none_yet else _average(self._snapshot_s, snapshot_s)
        self._none_yet = False


def _average(old: float, new: float) -> float:
    return new if not old else (1 - _NEWEST) * old + _NEWEST * new
