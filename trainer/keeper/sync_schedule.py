"""After which steps the ranks have sync points, and how often a snapshot is taken. Pure.

At each sync point the ranks agree on the next one: each proposes a number of steps, and the smallest counts. So every
rank knows that step, and no messages are exchanged before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# The longest time between two sync points, if steps are no slower than those before.
WITHIN_S = 1.0
# If steps become slower, no rank can sync earlier than agreed. So a rank relies on no more than twice the steps that it
# has measured recently.
_GROWTH = 2


class SyncSchedule:
    """The sync points as one rank sees them, after `step` was restored. The first is after that step.

    Each rank measures its steps, and proposes the next sync point so that the steps until then, one like its slowest
    recent step and the others like its recent ones, take at most WITHIN_S; there is also one after each multiple of
    `multiples`.
    """

    def __init__(self, step: int, multiples: Sequence[int] = ()) -> None:
        self._multiples = multiples
        # After which step the next sync point is.
        self.next = step
        self._left: tuple[int, float] | None = None
        # How many steps were measured since the last sync point.
        self.steps, self._took_s, self._slowest_s = 0, 0.0, 0.0
        # Of the steps before the last sync point: their number, and the mean and the longest duration.
        self._before = 0, 0.0, 0.0

    @property
    def step_s(self) -> float:
        """The mean step duration since the last sync point; 0 without steps."""
        return self._took_s / self.steps if self.steps else 0.0

    def reached(self, step: int, now_s: float) -> bool:
        """This rank is at the boundary after `step`. Returns whether it is a sync point: the same on all ranks."""
        if self._left is not None and step > self._left[0]:
            steps, took_s = step - self._left[0], now_s - self._left[1]
            self.steps, self._took_s = self.steps + steps, self._took_s + took_s
            self._slowest_s = max(self._slowest_s, took_s / steps)
        self._left = step, now_s
        return step >= self.next

    def leave(self, step: int, now_s: float) -> None:
        """The step after `step` begins now."""
        self._left = step, now_s

    def wanted(self, step: int, due: Iterable[int] = ()) -> int:
        """In how many steps this rank proposes the next sync point, at the one after `step`.

        `due` are steps after which it has something to do that cannot wait.
        """
        before, before_s, slowest_before_s = self._before
        slowest_s, mean_s = max(self._slowest_s, slowest_before_s), max(self.step_s, before_s)
        measured = _GROWTH * max(self.steps, before)
        # 1e-9 avoids a division by zero.
        allowed = min(measured, 1 + math.floor((WITHIN_S - slowest_s) / (mean_s + 1e-9)))
        multiples = ((step // every + 1) * every for every in self._multiples)
        return max(1, min([allowed, *(each - step for each in (*multiples, *due))]))

    def agreed(self, step: int, steps: int) -> None:
        """The sync point after `step` is over. The next one is `steps` steps later: the smallest number proposed."""
        self.next = step + steps
        if self.steps:
            self._before = self.steps, self.step_s, self._slowest_s
            self.steps, self._took_s, self._slowest_s = 0, 0.0, 0.0


# Snapshots take this share of the time: survivors save what they have. Copies of what one rank alone has take more.
SHARE, COPY_SHARE = 0.0025, 0.01
# The weight of the newest measurement in an average.
_NEWEST = 0.2


class Pace:
    """Decides after which steps this node takes a snapshot; `every` fixes the interval, else it is measured."""

    def __init__(self, every: int | None, step: int, fresh: int = 0, share: float = SHARE) -> None:
        """Begin after `step`. If it is not 0, a copy of it exists already. Copies take `share` of the time.

        The first `fresh` copies are not measured, since they allocate the memory.
        """
        self._share = share
        self.is_fixed = every is not None
        self._every, self._last = every, step
        self._step_s = self._snapshot_s = 0.0
        self._fresh = fresh
        # The first snapshot is always due: its cost is unknown until then, and without it a failure loses everything.
        self._none_yet = step == 0

    @property
    def every(self) -> int:
        """Steps between two snapshots, by the measurements so far."""
        if self._every is not None:
            return self._every
        if not self._snapshot_s or not self._step_s:
            return 1
        return max(1, math.ceil(self._snapshot_s / (self._share * self._step_s)))

    def step_took(self, step_s: float, steps: int = 1) -> None:
        """Record the duration of a step, without its snapshot, or the mean of `steps`."""
        self._step_s = _average(self._step_s, step_s, 1 - (1 - _NEWEST) ** steps)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of `step` is due."""
        if step <= self._last:
            return False
        return (self._none_yet and step > 0) or step - self._last >= self.every

    def due_after(self, step: int, *, is_taken: bool) -> int:
        """After which step the next snapshot is due; `is_taken`: one of `step` is taken."""
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
