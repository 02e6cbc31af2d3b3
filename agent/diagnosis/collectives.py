"""Reads torch's flight recorder: which rank is behind in its collectives, and how long each rank waits; pure.

The recorder counts the collectives that a rank has entered in each process group. All ranks of a group enter the same
ones in the same order: the numbers show which rank is behind. The format is that of `dump_json` in torch's
FlightRecorderDetail.hpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elaunch.strict_json import parse_json

# Four minutes. With only the samples of one minute, two healthy ranks that wait for half of the time would often
# differ by a tenth.
WINDOW_SAMPLES = 240
# Ranks that enter no collective for this many samples do something else: an evaluation, a checkpoint, a compilation.
_PAUSE_SAMPLES = 12
# torch's recorder of CPU collectives is the first one, and the default group is the first one in each recorder.
_CPU, _DEFAULT_GROUP = 0, 0
# A rank is slow if its share of waiting is smaller by this much than that of any other rank of its node.
_SLOW_MIN = 0.15


@dataclass(frozen=True)
class Count:
    """Numbers of the last collectives of a process group: entered by the rank, begun on its GPU, ended; -1 for none.

    Not every backend counts all three, and gloo counts a send as well.
    """

    entered: int
    begun: int
    ended: int

    @property
    def is_outstanding(self) -> bool:
        """Whether one has not ended. A backend of which none has ended may not count ends."""
        return 0 <= self.ended < self.entered


# By recorder and group, in the order in which the groups were made.
Counts = Mapping[tuple[int, int], Count]


def read_counts(text: bytes) -> Counts:
    """The counts in dumps, one in each line. Entries of another format are skipped."""
    found: dict[tuple[int, int], Count] = {}
    # The position of a dump identifies its recorder.
    for recorder, line in enumerate(text.splitlines()):
        try:
            groups = parse_json(line)["pg_status"].items()
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        for group, status in groups:
            try:
                numbers = (int(status[f"last_{which}_collective"]) for which in ("enqueued", "started", "completed"))
                found[recorder, int(group)] = Count(*numbers)
            except (KeyError, TypeError, ValueError):
                continue
    return dict(sorted(found.items()))


def is_stalled(before: Counts, now: Counts) -> bool:
    """Whether a rank has entered and ended nothing between two samples, and one of its collectives has not ended."""
    return before == now and any(count.is_outstanding for count in now.values())


def last_entered(counts: Counts) -> tuple[str, bool]:
    """The text of the rank's last collective in the default group, and whether one of any group has not ended."""
    groups = [count for (_, group), count in counts.items() if group == _DEFAULT_GROUP and count.entered > 0]
    newest = max(groups, key=lambda count: count.entered, default=None)
    text = ""
    if newest:
        text = f"{'in' if newest.is_outstanding else 'after'} collective {newest.entered} of the default group"
    return text, any(count.is_outstanding for count in counts.values())


@dataclass(frozen=True)
class WaitShares:
    """The share of the time that each rank spends waiting, sampled once a second.

    A share needs no clock common to the hosts, so ranks of different nodes can be compared by it: a rank that waits
    less than all others is the straggler. This window has had `samples`; each rank waited at `waited` of them. `counts`
    are those of the last one. At the last `paused` no rank had entered another collective.
    """

    samples: int = 0
    counts: Mapping[int, Count] = field(default_factory=dict)
    waited: Mapping[int, int] = field(default_factory=dict)
    paused: int = 0

    def after(self, counts: Mapping[int, Counts]) -> tuple[WaitShares, Mapping[int, float] | None]:
        """The state after another sample of all ranks, and each rank's share at the end of a window."""
        known = {rank: count for rank, each in counts.items() if (count := _default_group(each)) is not None}
        if len(known) < len(counts) or known.keys() != self.counts.keys():
            return WaitShares(counts=known), None
        has_moved = any(count.entered != self.counts[rank].entered for rank, count in known.items())
        paused = 0 if has_moved else self.paused + 1
        if paused > _PAUSE_SAMPLES:
            return WaitShares(counts=known), None
        waited = {rank: self.waited.get(rank, 0) + _waits(count) for rank, count in known.items()}
        state = replace(self, samples=self.samples + 1, counts=known, waited=waited, paused=paused)
        if state.samples < WINDOW_SAMPLES:
            return state, None
        return WaitShares(counts=known), {rank: count / WINDOW_SAMPLES for rank, count in waited.items()}


def _default_group(counts: Counts) -> Count | None:
    """The count of the default group; None where it does not show when the rank waits.

    A GPU's collectives are entered long before the GPU reaches them: only their start shows when it waits.
    """
    for (recorder, group), count in counts.items():
        if group == _DEFAULT_GROUP and count.entered > 0 and count.ended >= 0:
            return count if recorder == _CPU or count.begun >= 0 else None
    return None


def _waits(count: Count) -> bool:
    return count.ended < (count.begun if count.begun >= 0 else count.entered)


def slow_rank(shares: Mapping[int, float]) -> int:
    """The straggler: the rank that waits far less than all others, which wait for it; -1 if there is none."""
    ordered = sorted(shares, key=lambda rank: shares[rank])
    is_alone = len(ordered) > 1 and shares[ordered[1]] - shares[ordered[0]] >= _SLOW_MIN
    return ordered[0] if is_alone else -1


def slow_text(rank: int, local_rank: int, shares: Mapping[int, float]) -> tuple[str, float]:
    """The sentence about a rank that was slow in two windows, and the smallest share of waiting of the others."""
    wait = min(share for other, share in shares.items() if other != local_rank)
    return (
        f"rank {rank} is slower than the other ranks of this node: they waited in collectives for at least {wait:.0%}"
        f" of the last {2 * WINDOW_SAMPLES} s, and it for {shares[local_rank]:.0%}",
        wait,
    )
