"""A curve as the points of an SVG path, with axes whose ticks are round numbers (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elaunch.launcher.report_page.history import PastGeneration
from elaunch.launcher.report_page.metrics import Curve, Point
from elaunch.launcher.report_page.wording import duration

WIDTH, HEIGHT = 720, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 30
# The share of points that may be above the plot, if they are far above all others.
_OUTLIERS = 0.01


@dataclass(frozen=True)
class AxisTick:
    """A place on an axis, in the plot's units, with its words."""

    at: float
    words: str


@dataclass(frozen=True)
class Chart:
    """One plot. `band` is the path around lowest and highest values, `line` the path of the means; `data` is for
    the reader's pointer: x, y, first step, mean, lowest, highest."""

    title: str
    unit: str
    line: str
    band: str
    x_ticks: tuple[AxisTick, ...]
    y_ticks: tuple[AxisTick, ...]
    restarts: tuple[AxisTick, ...]
    data: tuple[tuple[float, float, int, float, float, float], ...]
    remark: str


def chart(
    title: str, unit: str, curve: Curve, generations: Sequence[PastGeneration], *, from_zero: bool
) -> Chart | None:
    """The plot of a curve over the steps, with a line where each generation went on; None without two points."""
    points = curve.points
    if len(points) < 2:
        return None
    first, last = points[0].step, max(points[-1].step + points[-1].count - 1, points[0].step + 1)
    low, high, cut = _range(points, from_zero)
    ticks = nice_ticks(low, high, 4)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(step: float) -> float:
        return round(LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT), 2)

    def y(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 2)

    middle = [point.step + (point.count - 1) / 2 for point in points]
    xs = [x(step) for step in middle]
    upper = [f"{at},{y(point.high)}" for at, point in zip(xs, points, strict=True)]
    lower = [f"{at},{y(point.low)}" for at, point in zip(xs, points, strict=True)]
    is_joined = any(point.count > 1 for point in points)
    starts = [(g.number, g.first_step) for g in generations if g.first_step > first]
    return Chart(
        title,
        unit,
        line="M" + "L".join(f"{at},{y(point.mean)}" for at, point in zip(xs, points, strict=True)),
        band="M" + "L".join([*upper, *lower[::-1]]) + "Z" if is_joined else "",
        x_ticks=tuple(
            AxisTick(x(step), f"{step:,.0f}") for step in nice_ticks(first, last, 7) if first <= step <= last
        ),
        y_ticks=tuple(AxisTick(y(value), _plain(value)) for value in ticks),
        restarts=tuple(AxisTick(x(step), f"generation {number}") for number, step in starts if step <= last),
        data=tuple(
            (at, y(p.mean), p.step, _short(p.mean), _short(p.low), _short(p.high))
            for at, p in zip(xs, points, strict=True)
        ),
        remark=_remark(curve, cut, title),
    )


def nice_ticks(low: float, high: float, number: int) -> list[float]:
    """About `number` round values that cover `low` … `high`."""
    span = max(high - low, abs(high) * 1e-9, 1e-12)
    power = 10.0 ** math.floor(math.log10(span / number))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= span / number)
    first = math.floor(low / step)
    return [round((first + i) * step, 12) for i in range(math.ceil(high / step) - first + 1)]


def _range(points: Sequence[Point], from_zero: bool) -> tuple[float, float, int]:
    """The lowest and highest value of the plot, and how many points are above it."""
    highs = sorted(point.high for point in points)
    high = highs[-1]
    usual = highs[max(0, math.ceil(len(highs) * (1 - _OUTLIERS)) - 2)]
    cut = 0
    if from_zero and high > 4 * usual > 0:
        high = 1.5 * usual
        cut = sum(value > high for value in highs)
    low = 0.0 if from_zero else min(point.low for point in points)
    return low, high if high > low else low + 1.0, cut


def _remark(curve: Curve, cut: int, title: str) -> str:
    said = []
    if curve.lost:
        said.append(f"not a number from step {curve.lost_step:,} on, in {curve.lost:,} steps")
    if cut:
        slowest = max(curve.points, key=lambda point: point.high)
        said.append(f"the slowest step, near step {slowest.step:,}, took {duration(slowest.high)} above the plot")
    return f"{title}: {'; '.join(said)}" if said else ""


def _plain(value: float) -> str:
    return f"{value:.10g}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
