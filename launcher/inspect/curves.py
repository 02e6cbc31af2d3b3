"""Loss and step time over the steps, from the lines of a training's `metrics.jsonl`, as SVG paths (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from elaunch.launcher.inspect.node_log import real
from elaunch.launcher.inspect.text import duration

# A curve has at most twice as many points.
POINTS = 500
# The plot's size in the template's units, with room for labels on the left.
WIDTH, HEIGHT, LEFT = 720, 180, 62
# Points above the plot are drawn at its upper edge, if so few are so much higher than all others.
_OUTLIERS, _FAR = 0.01, 4.0


@dataclass(frozen=True)
class Point:
    """The lowest and the highest value of neighbouring steps, of which `step` is the first."""

    step: int
    low: float
    high: float


class Curve:
    """A series of any length in at most 2 * POINTS points: neighbours are joined when there are more."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.last_step = -1
        # Values that are no finite numbers, and the first step that had one.
        self.not_finite = 0
        self.not_finite_step = -1
        self._width = 1
        self._added = 0

    def add(self, step: int, value: float) -> None:
        """Add the next step's value."""
        if not math.isfinite(value):
            self.not_finite_step = self.not_finite_step if self.not_finite else step
            self.not_finite += 1
            return
        self.last_step = step
        point = Point(step, value, value)
        if self._added % self._width:
            self.points[-1] = _joined(self.points[-1], point)
        else:
            self.points.append(point)
        self._added += 1
        if len(self.points) == 2 * POINTS and self._added % self._width == 0:
            self.points = [_joined(*self.points[at : at + 2]) for at in range(0, 2 * POINTS, 2)]
            self._width *= 2


def _joined(one: Point, other: Point) -> Point:
    return Point(one.step, min(one.low, other.low), max(one.high, other.high))


class StepMetrics:
    """The curves in a metrics file's lines, with `step`, `loss` and `seconds`; `steps` counts the lines of steps."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.loss, self.seconds = Curve(), Curve()
        self.steps = 0
        for line in lines:
            try:
                # Not `parse_json`: a loss may be NaN.
                record = json.loads(line)
            except (ValueError, RecursionError, MemoryError):
                continue
            step = record.get("step") if isinstance(record, dict) else None
            if type(step) is not int or not 0 <= step < 1 << 53:
                continue
            self.steps += 1
            loss, seconds = record.get("loss"), real(record.get("seconds"))
            if isinstance(loss, int | float) and not isinstance(loss, bool):
                # An int may be too large for a float.
                self.loss.add(step, loss if isinstance(loss, float) else real(loss))
            if seconds >= 0:
                self.seconds.add(step, seconds)


@dataclass(frozen=True)
class Chart:
    """One plot: `path` goes around the lowest and highest values; the axes' ends have labels."""

    title: str
    path: str
    low: str
    high: str
    first: str
    last: str
    remark: str


def charts(metrics: StepMetrics) -> list[Chart]:
    """The plots of the curves with two points or more."""
    curves = (("Loss", metrics.loss, False), ("Step time (s)", metrics.seconds, True))
    return [_chart(title, curve, is_time) for title, curve, is_time in curves if len(curve.points) > 1]


def _chart(title: str, curve: Curve, is_time: bool) -> Chart:
    points, remarks = curve.points, []
    if curve.not_finite:
        remarks.append(f"not a number from step {curve.not_finite_step:,} on, in {curve.not_finite:,} steps")
    highs = sorted(point.high for point in points)
    low, high = 0.0 if is_time else min(point.low for point in points), highs[-1]
    usual = highs[max(0, math.ceil(len(highs) * (1 - _OUTLIERS)) - 2)]
    if is_time and high > _FAR * usual > 0:
        slowest = max(points, key=lambda point: point.high)
        remarks.append(f"the slowest step, near step {slowest.step:,}, took {duration(slowest.high)}")
        high = 1.5 * usual
    first, last = points[0].step, max(curve.last_step, points[0].step + 1)

    def at(step: int, value: float) -> str:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT)
        share = (min(value, high) - low) / (high - low) if high > low else 0.5
        return f"{x:.2f},{(1 - share) * HEIGHT:.2f}"

    outline = [at(point.step, point.high) for point in points]
    outline += [at(point.step, point.low) for point in reversed(points)]
    ends = (f"{low:.5g}", f"{high:.5g}", f"step {first:,}", f"step {last:,}")
    return Chart(title, f"M{'L'.join(outline)}Z", *ends, "; ".join(remarks))
