"""Which nodes get the seats of a table. The seat of a lost node is for a node of its role. Pure.

A node with several roles (`ps=1,trainer=3`) is replaced by a node with the same ones; their numbers may differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from elaunch.rendezvous.rules.roles import roles_of
from elaunch.rendezvous.types import Node, RankTable


@dataclass(frozen=True)
class Seating:
    """The nodes that get a seat, in the order in which they were given.

    `vacant` are the roles of the seats that stay free for nodes of these roles, and `room` is the number of free seats
    for nodes of any role. `lacking` are the roles of vacant seats that no seated node has. `is_plain` says that all
    nodes have one role.
    """

    nodes: tuple[Node, ...]
    vacant: tuple[str, ...]
    room: int
    lacking: tuple[str, ...]
    is_plain: bool

    def is_enough(self, nodes_min: int) -> bool:
        """Whether a generation may begin: each role that the job had is there, and enough nodes are."""
        return len(self.nodes) >= nodes_min and not self.lacking

    def has_seat_for(self, node: Node) -> bool:
        """Whether this node would get one of the free seats."""
        return self.room > 0 or role_of_node(node.role, node.slots) in self.vacant


def seat(before: RankTable | None, nodes: Iterable[Node], nodes_max: int) -> Seating:
    """Give the seats of the table after `before` to `nodes`, first come, first served; the survivors come first."""
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
    """What a node must have in common with another to take its seat: its roles' names, without their numbers."""
    return ",".join(roles_of(role, slots))


def in_order_of_rank(nodes: Iterable[Node], before: RankTable | None) -> list[Node]:
    """Survivors of `before` keep their order. Newcomers follow by requested rank, then topology, then host name."""
    here = {node.node_id: node for node in nodes}
    survivors = [here.pop(seat.node_id) for seat in before.seats if seat.node_id in here] if before else []
    return [*survivors, *sorted(here.values(), key=_place)]


def _give(nodes: Iterable[Node], seats: Counter[str], room: int) -> Seating:
    """`seats` are the numbers of seats by role, and `room` further seats for any."""
    left, taken, seated = Counter(seats), [], set()
    roles = {*seats}
    for node in nodes:
        role = role_of_node(node.role, node.slots)
        roles.add(role)
        if left[role] > 0:
            left[role] -= 1
        elif room > 0:
            room -= 1
        else:
            continue
        taken.append(node)
        seated.add(role)
    vacant = tuple(sorted(left.elements()))
    return Seating(tuple(taken), vacant, room, tuple(sorted({*vacant} - seated)), is_plain=len(roles) <= 1)


def _place(node: Node) -> tuple[int, int, str, list[str | int], str]:
    """The sort key of newcomers: host-2 comes before host-10."""
    words = re.split(r"(\d+)", node.host)
    natural: list[str | int] = [int(word) if word.isdecimal() else word for word in words]
    return (node.node_rank < 0, node.node_rank, node.topology, natural, node.node_id)
