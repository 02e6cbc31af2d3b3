"""The size of DDP's buckets: which is measured next, when the search ends, and what it chooses. Pure.

A *pass* is a forward and backward pass whose gradients are summed over the ranks. All ranks run this same search on the
same times, which are those of the slowest rank, so they all come to the same choice. A size is in MiB, as DDP's
`bucket_cap_mb`; None is DDP's default: 25 MiB, and 1 MiB for the first bucket.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Another size than the default must save this share of a pass.
GAIN_MIN = 0.03
# DDP sums all gradients in one bucket in a first pass, and allocates the real buckets in a second; with `static_graph`
# one pass later.
_SETTLING = 3
_MEASURED = 3
# In the final, the best and the default take turns.
_TURNS, _MEASURED_IN_TURN = 3, 2
_SIZES_MB = (1.0, 5.0, 25.0, 100.0)
# The standard deviation of a normal distribution, in median absolute deviations.
_DEVIATION = 1.4826

Size: TypeAlias = float | None


def in_words(size: Size) -> str:
    """For a sentence."""
    return "DDP's default buckets" if size is None else f"buckets of {size:g} MiB"


@dataclass(frozen=True)
class SearchResult:
    """What was chosen, and why.

    `default_s` and `chosen_s` are medians of a pass, `spent_s` is the time of all `passes`.
    """

    bucket_mb: Size
    default_s: float
    chosen_s: float
    passes: int
    spent_s: float
    reason: str

    @property
    def gain(self) -> float:
        """How many times as fast a pass is as with DDP's default."""
        return self.default_s / self.chosen_s


def search(gradient_mb: float, run: Callable[[Size], float]) -> SearchResult:
    """Search with `run`, which makes a pass with buckets of that size, and returns the seconds of the slowest rank.

    The model sends `gradient_mb` MiB.
    """
    default: Size = None
    took_s: list[float] = []

    def measure(size: Size, count: int) -> list[float]:
        """The times of `count` passes with this size, after those in which DDP settles."""
        took_s.extend(run(size) for _ in range(_SETTLING + count))
        return took_s[-count:]

    def result(chosen: Size, samples: dict[Size, list[float]], reason: str) -> SearchResult:
        default_s, chosen_s = (statistics.median(samples[each]) for each in (default, chosen))
        return SearchResult(chosen, default_s, chosen_s, len(took_s), sum(took_s), reason)

    samples = {size: measure(size, _MEASURED) for size in (default, *sizes(gradient_mb))}
    best = min(samples, key=lambda each: statistics.median(samples[each]))
    if not _saves(samples[best], samples[default]):
        return result(default, samples, f"nothing else was faster by {GAIN_MIN:.0%}")
    # Only passes of the final count: the two took turns in it, whatever else changed.
    turns: list[dict[Size, list[float]]] = []
    for number in range(_TURNS):
        turns.append({})
        for size in (default, best) if number % 2 == 0 else (best, default):
            turns[-1][size] = measure(size, _MEASURED_IN_TURN)
    pooled: dict[Size, list[float]] = {each: [s for turn in turns for s in turn[each]] for each in (default, best)}
    # The least of a turn: something else on the machine makes single passes longer, and none shorter.
    wins_each = all(min(turn[best]) < min(turn[default]) for turn in turns)
    if wins_each and _saves(pooled[best], pooled[default]) and _is_clear(pooled[best], pooled[default]):
        return result(best, pooled, "it won each turn")
    return result(default, pooled, "what looked faster did not stay so in turns")


def sizes(gradient_mb: float) -> list[float]:
    """The sizes to try besides the default."""
    found = [size for size in _SIZES_MB if size < gradient_mb]
    if gradient_mb > _SIZES_MB[0]:
        # One bucket: nothing overlaps with the backward pass, but it is one message.
        found.append(float(math.ceil(gradient_mb) + 1))
    return found


def _saves(samples: Sequence[float], beside: Sequence[float]) -> bool:
    """Whether they are shorter by the share that is worth a change."""
    return statistics.median(samples) <= (1 - GAIN_MIN) * statistics.median(beside)


def _is_clear(samples: Sequence[float], beside: Sequence[float]) -> bool:
    """Whether they are shorter by more than the noise of both."""
    return statistics.median(beside) - statistics.median(samples) > _noise_s(samples) + _noise_s(beside)


def _noise_s(samples: Sequence[float]) -> float:
    """A standard error of the median, by the samples' median distance from it."""
    middle = statistics.median(samples)
    return _DEVIATION * statistics.median(abs(each - middle) for each in samples) / math.sqrt(len(samples))
