"""The roles of a node's workers: one role for all of them, or several with their numbers. Pure.

A node's record and its seat have this in one text: a name, or `ps=1,trainer=3` in the order of local ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elaunch.rendezvous.types import Seat

_COUNT = r"[^\s=,]+=[1-9][0-9]{0,6}"
_COUNTS = re.compile(rf"{_COUNT}(,{_COUNT})*")


class RolePlace(NamedTuple):
    """A worker's role, and its place among the workers of that role on all nodes."""

    name: str
    rank: int
    world_size: int


def counts_in(text: str) -> Mapping[str, int]:
    """The number of workers by role, if `text` says numbers and names no role twice; else empty: it is one name."""
    if not _COUNTS.fullmatch(text):
        return {}
    pairs = [pair.split("=") for pair in text.split(",")]
    counts = {name: int(number) for name, number in pairs}
    return counts if len(counts) == len(pairs) else {}


def roles_of(role: str, slots: int) -> tuple[str, ...]:
    """The names of the roles on a node with `slots` workers whose record has `role`, in the order of their names."""
    return tuple(sorted(name for name, _, _ in _runs(role, slots)))


def role_of(role: str, slots: int, local_rank: int) -> str:
    """The name of the role of one worker, on a node with `slots` workers whose record has `role`."""
    return next(name for name, first, count in _runs(role, slots) if local_rank < first + count)


def role_place(seats: Sequence[Seat], group_rank: int, local_rank: int) -> RolePlace:
    """The role of one worker. A role's ranks are counted over all nodes, in the order of the ranks."""
    seat = seats[group_rank]
    name, first, _ = next(run for run in _runs(seat.role, seat.slots) if local_rank < run[1] + run[2])
    before, size = (_sizes(some)[name] for some in (seats[:group_rank], seats))
    return RolePlace(name, before + local_rank - first, size)


def role_sizes(seats: Sequence[Seat]) -> Mapping[str, int]:
    """The number of workers of each role on all nodes, in the order of their first ranks."""
    return _sizes(seats)


def _sizes(seats: Sequence[Seat]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    # Each worker of a node asks, and most nodes are alike.
    for (role, slots), nodes in Counter((seat.role, seat.slots) for seat in seats).items():
        for name, _, count in _runs(role, slots):
            sizes[name] += nodes * count
    return sizes


@cache
def _runs(role: str, slots: int) -> tuple[tuple[str, int, int], ...]:
    """Each role of a node with its first local rank and its number of workers.

    If the numbers do not make `slots`, the text is one name: a record may come from another program.
    """
    counts = counts_in(role)
    if sum(counts.values()) != slots:
        return ((role, 0, slots),)
    runs, first = [], 0
    for name, count in counts.items():
        runs.append((name, first, count))
        first += count
    return tuple(runs)
