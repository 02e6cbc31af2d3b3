"""What a list of samples says: median, 95th percentile, ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Of `n` samples; `median` and `p95` are in their unit."""

    n: int
    median: float
    p95: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, linear between two. Raises ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float]) -> Summary | None:
    """None where there is no value."""
    return Summary(len(values), statistics.median(values), percentile(values, 0.95)) if values else None


def ratio(of: Summary | None, to: Summary | None) -> float | None:
    """The ratio of two medians; None where one is missing or the second is 0."""
    return of.median / to.median if of and to and to.median else None
