"""Median, 95th percentile and ratio of samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median and 95th percentile of `n` samples, in the samples' unit."""

    n: int
    median: float
    p95: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, interpolated. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float]) -> Summary | None:
    """The summary, or None if there is no value."""
    return Summary(len(values), statistics.median(values), percentile(values, 0.95)) if values else None


def ratio(of: Summary | None, to: Summary | None) -> float | None:
    """The ratio of two medians, or None if one is missing or the second is 0."""
    return of.median / to.median if of and to and to.median else None
