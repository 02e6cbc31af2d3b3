"""Loss and step time over the steps, from the lines of a training's `metrics.jsonl`, as SVG paths (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from elaunch.launcher.inspect.node_log import real
from elaunch.launcher.inspect.text import duration

# A curve shows at most so many neighbourhoods of steps, each from its lowest to its highest value.
POINTS = 500
# The plot's size in the template's units, with room for labels on the left.
WIDTH, HEIGHT, LEFT = 720, 180, 62
# Step times above this multiple of the usual one are drawn at the plot's upper edge.
_FAR = 4.0

Series = list[tuple[int, float]]


class StepMetrics:
    """The series in a metrics file's lines, with `step`, `loss` and `seconds`; `steps` counts the lines of steps."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.loss: Series = []
        self.seconds: Series = []
        self.steps = 0
        # The first step whose loss is no finite number, -1 if there is none.
        self.not_finite_step = -1
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
            loss, seconds = real(record.get("loss")), real(record.get("seconds"))
            if not math.isnan(loss):
                self.loss.append((step, loss))
            elif isinstance(record.get("loss"), float) and self.not_finite_step < 0:
                self.not_finite_step = step
            if seconds >= 0:
                self.seconds.append((step, seconds))


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
    """The plots of the series with two points or more."""
    found = []
    if len(metrics.loss) > 1:
        values = [value for _, value in metrics.loss]
        at = metrics.not_finite_step
        remark = f"not a number from step {at:,} on" if at >= 0 else ""
        found.append(_chart("Loss", metrics.loss, min(values), max(values), remark))
    if len(metrics.seconds) > 1:
        step, slowest_s = max(metrics.seconds, key=lambda point: point[1])
        usual_s = median(value for _, value in metrics.seconds)
        is_far = slowest_s > _FAR * usual_s > 0
        remark = f"the slowest step, {step:,}, took {duration(slowest_s)}" if is_far else ""
        found.append(_chart("Step time (s)", metrics.seconds, 0.0, _FAR * usual_s if is_far else slowest_s, remark))
    return found


def _chart(title: str, series: Series, low: float, high: float, remark: str) -> Chart:
    first, last = series[0][0], max(series[-1][0], series[0][0] + 1)

    def at(step: int, value: float) -> str:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT)
        share = (min(value, high) - low) / (high - low) if high > low else 0.5
        return f"{x:.2f},{(1 - share) * HEIGHT:.2f}"

    width = math.ceil(len(series) / POINTS)
    groups = [series[begin : begin + width] for begin in range(0, len(series), width)]
    outline = [at(group[0][0], max(value for _, value in group)) for group in groups]
    outline += [at(group[0][0], min(value for _, value in group)) for group in reversed(groups)]
    ends = (f"{low:.5g}", f"{high:.5g}", f"step {first:,}", f"step {last:,}")
    return Chart(title, f"M{'L'.join(outline)}Z", *ends, remark)
