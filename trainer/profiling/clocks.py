"""How far the clocks of hosts are apart, from times that were sent to and fro (pure).

Rank 0 notes its clock, sends a word to all ranks, and notes it again when their answers are there. Each rank notes its
own clock between the two. So a rank's clock was read after the first note and before the second: this bounds how far it
is ahead of rank 0's, from both sides (Cristian, "Probabilistic clock synchronization", 1989). The narrowest of several
rounds counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClockReading:
    """A rank's clock as it got rank 0's word (or sent it), and as it sent its answer (or had all). In ns."""

    got_ns: int
    sent_ns: int


@dataclass(frozen=True)
class ClockOffset:
    """A clock is `ahead_ns` ahead of rank 0's, give or take `error_ns`."""

    ahead_ns: int = 0
    error_ns: int = 0


def clock_offsets(clocks: Sequence[str], rounds: Sequence[Sequence[ClockReading]]) -> list[ClockOffset]:
    """The offset of each rank's clock. `clocks` names the clock that a rank reads: ranks of a host read the same one.

    A round has the readings of all ranks, rank 0's first. If a clock was set meanwhile the rounds contradict each
    other; then the narrowest round alone counts.
    """
    offsets = []
    for rank, clock in enumerate(clocks):
        if clock == clocks[0] or not rounds:
            offsets.append(ClockOffset())
            continue
        bounds = [_bounds(readings[0], readings[rank]) for readings in rounds]
        low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
        if low > high:
            low, high = min(bounds, key=lambda each: each[1] - each[0])
        offsets.append(ClockOffset((low + high) // 2, (high - low + 1) // 2))
    return offsets


def _bounds(leader: ClockReading, other: ClockReading) -> tuple[int, int]:
    """At least, and at most so far is the other clock ahead."""
    # The answer was sent before the leader had all; the word was sent before the other got it.
    return other.sent_ns - leader.sent_ns, other.got_ns - leader.got_ns
