"""The lines that a training writes for each step (`metrics.jsonl`): curves of bounded length, sums per generation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elaunch.launcher.report_page.events import real

# A curve has at most twice as many points.
POINTS = 600
_GAP_S = 30.0


@dataclass(frozen=True)
class Point:
    """The values of some neighbouring steps: how many, their mean, lowest and highest. `step` is the first of them."""

    step: int
    count: int
    mean: float
    low: float
    high: float


class Curve:
    """A series of any length in at most 2 * POINTS points: neighbours are joined when there are more."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        # Values that are no finite numbers, and the first step that had one.
        self.lost = 0
        self.lost_step = -1
        self._width = 1

    def add(self, step: int, value: float) -> None:
        """Add the next step's value."""
        if not math.isfinite(value):
            self.lost_step = step if not self.lost else self.lost_step
            self.lost += 1
            return
        newest = self.points[-1] if self.points else None
        point = Point(step, 1, value, value, value)
        if newest and newest.count < self._width:
            self.points[-1] = _joined(newest, point)
        else:
            self.points.append(point)
        if len(self.points) > 2 * POINTS:
            pairs = zip(self.points[::2], [*self.points[1::2], None], strict=False)
            self.points = [_joined(one, other) if other else one for one, other in pairs]
            self._width *= 2


@dataclass(frozen=True)
class Stretch:
    """The steps that one generation added to the file. `begin_at` and `end_at` are wall clock, NaN if not written.

    `trained_s` is the time of all these steps.
    """

    generation: int
    first_step: int
    last_step: int
    trained_s: float
    begin_at: float
    end_at: float

    def joined(self, later: Stretch) -> Stretch:
        """Both, as one."""
        trained_s = self.trained_s + later.trained_s
        return replace(self, last_step=later.last_step, trained_s=trained_s, end_at=later.end_at)


class StepMetrics:
    """What a metrics file says; `add` takes its lines in order. `steps_lost` is -1 if no line has it."""

    def __init__(self) -> None:
        self.loss, self.seconds = Curve(), Curve()
        self.stretches: list[Stretch] = []
        self.steps_lost = -1
        self.unreadable = 0
        self.steps = 0

    def add_all(self, lines: Iterable[bytes]) -> StepMetrics:
        for line in lines:
            if not self._add(line) and line.strip():
                self.unreadable += 1
        return self

    def _add(self, line: bytes) -> bool:
        try:
            # Not `parse_json`: a loss may be NaN.
            record = json.loads(line)
        except (ValueError, RecursionError, MemoryError):
            return False
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is not int or not 0 <= step < 1 << 53:
            return False
        loss, seconds = record.get("loss"), real(record.get("seconds"))
        self.steps += 1
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            # An int may be too large for a float.
            self.loss.add(step, loss if isinstance(loss, float) else real(loss))
        if seconds >= 0:
            self.seconds.add(step, seconds)
        generation, lost = record.get("generation"), record.get("steps_lost")
        if type(lost) is int and 0 <= lost < 1 << 53:
            self.steps_lost = lost
        if type(generation) is int and 0 <= generation < 1 << 31 and seconds >= 0:
            self._extend(generation, step, seconds, real(record.get("at")))
        return True

    def _extend(self, generation: int, step: int, seconds: float, at: float) -> None:
        newest = self.stretches[-1] if self.stretches else None
        is_next = newest and newest.generation == generation and step > newest.last_step
        # `seconds` counts from the step before: a gap is another run's, or steps that could not be written.
        if newest and is_next and not at - seconds - newest.end_at > _GAP_S:
            trained_s = max(newest.trained_s + seconds, real(at - newest.begin_at, 0.0))
            self.stretches[-1] = replace(newest, last_step=step, trained_s=trained_s, end_at=at)
        else:
            self.stretches.append(Stretch(generation, step, step, seconds, at - seconds, at))


def _joined(one: Point, other: Point) -> Point:
    number = one.count + other.count
    mean = one.mean + (other.mean - one.mean) * other.count / number
    return Point(one.step, number, mean, min(one.low, other.low), max(one.high, other.high))
