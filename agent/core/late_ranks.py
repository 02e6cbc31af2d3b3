"""Which rank of a node enters the collectives last, again and again; pure.

Each look compares how many collectives the ranks have entered. A rank that is alone behind all others in many looks is
a suspect: it costs nothing to see. What proves it is the recorders' entries, in which each rank has the time at which
it entered each collective, all on one host's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elaunch.agent.core.collectives import DEFAULT_GROUP, Collective, Counts

# There is a look each second. A rank is a suspect that was behind in so many windows in a row: two minutes.
LOOKS = 60
WINDOWS = 2
# The entries are read at most once in so many windows: to write them takes up to 0.1 s, in which the program waits.
_REST = 5
_SHARE_MIN = 0.10
# The others' largest share: ranks that take turns are not slow.
_OTHERS_MAX = 1 / 3
_COLLECTIVES_MIN = 20
_PARTS = 5
# In each part of the time the rank is late for at least this share of it.
_PART_SHARE_MIN = 0.05
_BLAME_MIN = 0.8


@dataclass(frozen=True)
class Behind:
    """What the looks of a generation have shown.

    `behind` counts the looks of this window in which a rank alone was behind, and `moves` those in which a rank had
    entered a collective since the last look. `suspect` was the one behind in each of the last `windows` windows. For
    `rest` windows from now on no entries are asked for.
    """

    looks: int = 0
    moves: int = 0
    numbers: Mapping[int, int] = field(default_factory=dict)
    behind: Mapping[int, int] = field(default_factory=dict)
    suspect: int = -1
    windows: int = 0
    rest: int = 0

    def after(self, counts: Mapping[int, Counts]) -> tuple[Behind, int | None]:
        """The state after another look at all ranks, and a rank whose entries are to be read now."""
        numbers = _numbers(counts)
        if len(numbers) < 2 or (self.numbers and numbers.keys() != self.numbers.keys()):
            return Behind(numbers=numbers, rest=self.rest), None
        behind = dict(self.behind)
        low = min(numbers.values())
        last = [rank for rank, number in numbers.items() if number == low]
        if len(last) == 1:
            behind[last[0]] = behind.get(last[0], 0) + 1
        moves = self.moves + (numbers != self.numbers)
        known = replace(self, looks=self.looks + 1, moves=moves, numbers=numbers, behind=behind)
        return known._judged() if known.looks == LOOKS else (known, None)

    def _judged(self) -> tuple[Behind, int | None]:
        afresh = Behind(numbers=self.numbers, rest=max(self.rest - 1, 0))
        rank = max(self.behind, key=lambda rank: self.behind[rank], default=-1)
        others = max((looks for other, looks in self.behind.items() if other != rank), default=0)
        share = self.behind.get(rank, 0) / LOOKS
        if self.moves < 2 or share < _SHARE_MIN or others > _OTHERS_MAX * self.behind[rank]:
            return afresh, None
        windows = self.windows + 1 if rank == self.suspect else 1
        if windows < WINDOWS or afresh.rest:
            return replace(afresh, suspect=rank, windows=windows), None
        return replace(afresh, rest=_REST), rank


@dataclass(frozen=True)
class Late:
    """The other ranks of the node waited for `rank`, for `share` of the time; for `late_s` at a usual collective."""

    rank: int
    share: float
    late_s: float
    collectives: int


def late_rank(entries: Mapping[int, Sequence[Collective]]) -> Late | None:
    """The rank that enters the default group's collectives last all the time, if there is one."""
    times = {rank: {e.number: e.at_s for e in each if e.group == DEFAULT_GROUP} for rank, each in entries.items()}
    if len(times) < 2:
        return None
    common = sorted(set.intersection(*(set(each) for each in times.values())))
    if len(common) < _COLLECTIVES_MIN:
        return None
    waits = [_wait({rank: each[number] for rank, each in times.items()}) for number in common]
    begun = [min(each[number] for each in times.values()) for number in common]
    span_s = begun[-1] - begun[0]
    sums: dict[int, float] = {}
    for rank, wait_s in waits:
        sums[rank] = sums.get(rank, 0.0) + wait_s
    rank = max(sums, key=lambda rank: sums[rank])
    own = [wait_s for other, wait_s in waits if other == rank]
    is_blamed = span_s > 0 and sums[rank] >= _BLAME_MIN * sum(sums.values()) and sums[rank] >= _SHARE_MIN * span_s
    if not is_blamed or not _is_always_late(rank, waits, begun):
        return None
    # Of many collectives in a row, as at the end of a backward pass, only the first has to wait.
    matter = [wait_s for wait_s in own if wait_s >= sums[rank] / len(own) / 2]
    return Late(rank, sums[rank] / span_s, sum(matter) / len(matter), len(common))


def _wait(entered: Mapping[int, float]) -> tuple[int, float]:
    """Who entered a collective last, and how long after the last of the others."""
    *_, (before_s, _), (last_s, rank) = sorted((at_s, rank) for rank, at_s in entered.items())
    return rank, last_s - before_s


def _is_always_late(rank: int, waits: Sequence[tuple[int, float]], begun: Sequence[float]) -> bool:
    """Whether it is late in each part of the time: one long evaluation is no slow rank."""
    part_s = (begun[-1] - begun[0]) / _PARTS
    late_s = [0.0] * _PARTS
    for (last, wait_s), at_s in zip(waits, begun, strict=True):
        if last == rank:
            late_s[min(int((at_s - begun[0]) / part_s), _PARTS - 1)] += wait_s
    return all(each >= _PART_SHARE_MIN * part_s for each in late_s)


def _numbers(counts: Mapping[int, Counts]) -> dict[int, int]:
    """How many collectives each rank has entered in the oldest group that all of them have: the default group."""
    groups = set.intersection(*(set(each) for each in counts.values())) if counts else set()
    return {rank: each[min(groups)].entered for rank, each in counts.items()} if groups else {}
