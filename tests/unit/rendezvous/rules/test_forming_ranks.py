"""rendezvous.rules.form_generation: who has which ranks (rule 5)."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.job_world import PORT, A, B, C, D, World, node, running

SIGNAL = FailureKind.SIGNAL


# --- 5: who has which ranks


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    world = running(B, C)
    world.fail(SIGNAL, nodes=(B,))
    world.join(A, C, B)

    world.seal()

    assert [(seat.node_id, seat.first_rank) for seat in world.table.seats] == [
        (B.node_id, 0),
        (C.node_id, 2),
        (A.node_id, 5),
    ]
    assert (world.table.master_addr, world.table.master_port) == (B.address, PORT + B.slots)


def test_more_nodes_than_seats_stay_without_one() -> None:
    world = World()
    world.join(D, C, B, A)

    assert world.seal() == "abc"
    assert world.table.group_rank(D.node_id) is None


NEWCOMERS = {
    "as their users asked": (node("a", node_rank=2), node("b", node_rank=0), node("c", node_rank=1)),
    "those who asked first": (node("a"), node("b"), node("c", node_rank=5)),
    "neighbours side by side": (node("a", topology="x"), node("b", topology="w"), node("c", topology="x")),
    "host-2 before host-10": (node("a", host="n-10"), node("b", host="n-9"), node("c", host="n-010")),
    "the same host twice": (node("c", host="n"), node("a", host="n"), node("b", host="n")),
    "hosts that begin with numbers": (node("a", host="10-x"), node("b", host="9-x"), node("c", host="x")),
}
ORDERS = dict(zip(NEWCOMERS, ("bca", "cab", "bac", "bca", "abc", "bac"), strict=True))


@pytest.mark.parametrize("how", NEWCOMERS)
def test_newcomers_are_seated(how: str) -> None:
    nodes = NEWCOMERS[how]
    world = World(first=nodes[0])
    world.join(*nodes)

    assert world.seal() == ORDERS[how]


def test_a_wished_rank_does_not_unseat_a_survivor() -> None:
    world = running(A)
    first = node("z", node_rank=0)
    world.fail(SIGNAL)
    world.join(first, A)

    assert world.seal() == "az"
