"""Assigns a table's seats to nodes, orders the nodes by rank, and counts the roles of their workers. Pure.

A node's record and its seat have the roles in one text: a name, or `ps=1,trainer=3` in the order of local ranks. The
seat of a lost node is reserved for its role. A node with several roles is replaced by a node with the same ones; their
worker counts may differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from elaunch.rendezvous.types import Node, RankTable, Seat

_COUNT = r"[^\s=,]+=[1-9][0-9]{0,6}"
_COUNTS = re.compile(rf"{_COUNT}(,{_COUNT})*")


@dataclass(frozen=True)
class Seating:
    """The nodes that get a seat, in the order in which they were given.

    `vacant` are the roles of the seats that stay free for nodes of these roles, and `free` is the number of free seats
    for nodes of any role. `lacking` are the roles of vacant seats that no seated node has. `is_plain`: all nodes have
    one role.
    """

    nodes: tuple[Node, ...]
    vacant: tuple[str, ...]
    free: int
    lacking: tuple[str, ...]
    is_plain: bool

    def is_enough(self, nodes_min: int) -> bool:
        """Whether a generation may begin: with enough nodes, and each role that the job had."""
        return len(self.nodes) >= nodes_min and not self.lacking

    def has_seat_for(self, node: Node) -> bool:
        """Whether this node would get one of the free seats."""
        return self.free > 0 or role_of_node(node.role, node.slots) in self.vacant


def seat(before: RankTable | None, nodes: Iterable[Node], nodes_max: int) -> Seating:
    """Give the seats of the table after `before` to `nodes` in the given order, in which survivors should be first."""
    seats: Counter[str] = Counter()
    if before:
        seats.update(role_of_node(seat.role, seat.slots) for seat in before.seats)
        seats.update(before.vacant)
    return _give(nodes, seats, nodes_max - seats.total())


def newcomers_of(table: RankTable, nodes: Iterable[Node], nodes_max: int) -> tuple[Node, ...]:
    """Those of `nodes` that would get a free seat if all nodes of `table` stay."""
    return _give(nodes, Counter(table.vacant), nodes_max - len(table.seats) - len(table.vacant)).nodes


@cache
def role_of_node(role: str, slots: int) -> str:
    """The names of a node's roles, without their numbers: only a node with the same names can take its seat."""
    return ",".join(sorted(name for name, _, _ in _runs(role, slots)))


def in_order_of_seating(nodes: Iterable[Node], before: RankTable | None) -> list[Node]:
    """Survivors of `before` keep their order. Newcomers follow by requested rank, then topology, then host name."""
    here = {node.node_id: node for node in nodes}
    survivors = [here.pop(seat.node_id) for seat in before.seats if seat.node_id in here] if before else []
    # First those in a lost node's place: most likely that of a survivor beside its seat, as the table has no topology.
    places = {node.node_id: node.topology for node in survivors}
    beside = pairwise(places.get(seat.node_id) for seat in before.seats) if before else ()
    short = {place for pair in beside if None in pair for place in pair}
    newcomers = by_topology(sorted(here.values(), key=_sort_key))
    return [*survivors, *sorted(newcomers, key=lambda node: node.topology not in short)]


def by_topology(nodes: Sequence[Node]) -> list[Node]:
    """`nodes` in their order, but with those of one topology together, after the first of them, and so at each level.

    Survivors that were together keep their order, and newcomers follow the survivors beside which they are.
    """
    first, places = dict[str, int](), dict[str, list[int]]()
    for position, node in enumerate(nodes):
        # rack3, rack3.switch7, …
        levels = accumulate(node.topology.split(".", 8), "{}.{}".format)
        places[node.node_id] = [*(first.setdefault(level, position) for level in levels), position]
    return sorted(nodes, key=lambda node: places[node.node_id])


def _give(nodes: Iterable[Node], seats: Counter[str], free: int) -> Seating:
    """`seats` counts the reserved seats by role; `free` is the number of further seats, for any role."""
    left, taken, seated = Counter(seats), [], set()
    roles = {*seats}
    for node in nodes:
        role = role_of_node(node.role, node.slots)
        roles.add(role)
        if left[role] > 0:
            left[role] -= 1
        elif free > 0:
            free -= 1
        else:
            continue
        taken.append(node)
        seated.add(role)
    vacant = tuple(sorted(left.elements()))
    return Seating(tuple(taken), vacant, free, tuple(sorted({*vacant} - seated)), is_plain=len(roles) <= 1)


def _sort_key(node: Node) -> tuple[int, int, list[str | int], str]:
    """The sort key of newcomers: host-2 comes before host-10."""
    parts = re.split(r"(\d+)", f"{node.topology} {node.host}")
    natural: list[str | int] = [int(part) if part.isdecimal() else part for part in parts]
    return (node.node_rank < 0, node.node_rank, natural, node.node_id)


class RolePlace(NamedTuple):
    """A worker's role, its rank among the workers of that role on all nodes, and their number."""

    name: str
    rank: int
    world_size: int


def counts_in(text: str) -> Mapping[str, int]:
    """The number of workers by role, if `text` has numbers and names no role twice; else empty: it is one name."""
    if not _COUNTS.fullmatch(text):
        return {}
    pairs = [pair.split("=") for pair in text.split(",")]
    counts = {name: int(number) for name, number in pairs}
    return counts if len(counts) == len(pairs) else {}


def role_of(role: str, slots: int, local_rank: int) -> str:
    """The name of the role of one worker, on a node with `slots` workers whose record has `role`."""
    return next(name for name, first, count in _runs(role, slots) if local_rank < first + count)


def role_place(seats: Sequence[Seat], group_rank: int, local_rank: int) -> RolePlace:
    """The role of one worker. A role's ranks are counted over all nodes, in the order of the ranks."""
    seat = seats[group_rank]
    name, first, _ = next(run for run in _runs(seat.role, seat.slots) if local_rank < run[1] + run[2])
    before, size = (role_sizes(some)[name] for some in (seats[:group_rank], seats))
    return RolePlace(name, before + local_rank - first, size)


def role_sizes(seats: Sequence[Seat]) -> Counter[str]:
    """The number of workers of each role on all nodes, in the order of their first ranks."""
    sizes: Counter[str] = Counter()
    # Called for each worker of a node, and most nodes are alike.
    for (role, slots), nodes in Counter((seat.role, seat.slots) for seat in seats).items():
        for name, _, count in _runs(role, slots):
            sizes[name] += nodes * count
    return sizes


@cache
def _runs(role: str, slots: int) -> tuple[tuple[str, int, int], ...]:
    """Each role of a node with its first local rank and its number of workers.

    If the numbers do not add up to `slots`, the text is one name: a record may come from another program.
    """
    counts = counts_in(role)
    if sum(counts.values()) != slots:
        return ((role, 0, slots),)
    runs, first = [], 0
    for name, count in counts.items():
        runs.append((name, first, count))
        first += count
    return tuple(runs)
