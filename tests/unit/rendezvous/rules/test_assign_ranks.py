"""rendezvous.rules.assign_ranks: which nodes get a seat, by their roles, and which role each worker has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.rules.assign_ranks import (
    by_topology,
    counts_in,
    in_order_of_seating,
    newcomers_of,
    role_of,
    role_of_node,
    role_place,
    role_sizes,
    seat,
)
from elaunch.rendezvous.rules.snapshot import decode_table, encode_table, seats_of
from elaunch.rendezvous.types import Node, RankTable
from tests.unit.agent.job_world import TERMS, World, node

MIXED = seats_of([("a-1", 4, "ps=1,trainer=3"), ("b-1", 2, "trainer"), ("c-1", 3, "ps=2,reader=1")])


def test_the_roles_of_a_node_come_in_the_order_of_its_local_ranks() -> None:
    assert [role_of("ps=1,trainer=3", 4, local_rank) for local_rank in range(4)] == ["ps", *3 * ["trainer"]]


def test_a_roles_ranks_are_counted_over_all_nodes_in_the_order_of_the_ranks() -> None:
    places = [role_place(MIXED, group, local) for group, seat in enumerate(MIXED) for local in range(seat.slots)]

    assert [place for place in places if place.name == "ps"] == [("ps", 0, 3), ("ps", 1, 3), ("ps", 2, 3)]
    assert [place.rank for place in places if place.name == "trainer"] == [0, 1, 2, 3, 4]
    assert places[-1] == ("reader", 0, 1)


def test_the_sizes_of_all_roles_are_in_the_order_of_their_first_ranks() -> None:
    assert list(role_sizes(MIXED).items()) == [("ps", 3), ("trainer", 5), ("reader", 1)]


@pytest.mark.parametrize("name", ["ps=1,trainer=3", "ps=2", "a=1,a=3", "ps", "a b=4", "=4", "ps=0,trainer=4"])
def test_a_text_whose_numbers_are_not_those_of_the_workers_is_one_name(name: str) -> None:
    assert role_of(name, 5, 4) == name


@pytest.mark.parametrize("text", ["ps=1,", "ps=01", "ps=-1", "ps=1,ps=2", "p s=1", "ps=1, trainer=2", "ps", "", "=1"])
def test_other_texts_have_no_numbers(text: str) -> None:
    assert counts_in(text) == {}


# Seats.


def ps(letter: str, slots: int = 1) -> Node:
    return replace(node(letter, slots), role="ps")


def trainer(letter: str, slots: int = 1) -> Node:
    return replace(node(letter, slots), role="trainer")


def table(*nodes: Node, vacant: tuple[str, ...] = ()) -> RankTable:
    return RankTable(3, seats_of([(n.node_id, n.slots, n.role) for n in nodes]), "a", 1, "any", vacant=vacant)


A, B, C, D = ps("a"), trainer("b"), trainer("c"), ps("d")


def test_the_first_table_takes_nodes_of_any_role() -> None:
    seating = seat(None, [D, A, B], 2)

    assert seating.nodes == (D, A)
    assert (seating.vacant, seating.free, seating.lacking) == ((), 0, ())


def test_a_seat_that_is_free_is_for_a_node_of_its_role() -> None:
    seating = seat(table(A, B), [A, D], 2)

    assert seating.nodes == (A,)
    assert seating.vacant == ("trainer",)
    assert not seating.has_seat_for(D)
    assert seating.has_seat_for(C)
    assert not seating.is_enough(2)


def test_a_new_seat_is_for_any_role() -> None:
    seating = seat(table(A, B), [A, B, D], 3)

    assert seating.nodes == (A, B, D)
    assert (seating.vacant, seating.free) == ((), 0)


def test_fewer_nodes_of_a_role_are_enough_and_none_is_not() -> None:
    fewer, none = seat(table(A, B, C), [A, B], 3), seat(table(A, B, C), [B, C], 3)

    assert (fewer.vacant, fewer.lacking, fewer.is_enough(1)) == (("trainer",), (), True)
    assert (none.vacant, none.lacking, none.is_enough(1)) == (("ps",), ("ps",), False)


def test_vacant_seats_are_passed_on_from_table_to_table() -> None:
    before = table(A, B, vacant=("trainer",))

    assert seat(before, [A, B, D], 3).nodes == (A, B)
    assert seat(before, [A, B, D, C], 3).nodes == (A, B, C)
    assert newcomers_of(before, [D], 3) == ()
    assert newcomers_of(before, [D, C], 3) == (C,)
    assert newcomers_of(before, [D, C], 4) == (D, C)


def test_a_node_with_several_roles_is_replaced_by_one_with_the_same_whatever_their_numbers() -> None:
    head, other = replace(node("a", 4), role="ps=1,trainer=3"), replace(node("d", 3), role="trainer=2,ps=1")

    assert role_of_node("trainer=2", 2) == role_of_node("trainer", 8) == "trainer"
    assert role_of_node("trainer=2", 3) == "trainer=2"
    assert seat(table(head, B), [B, other, C], 2).nodes == (B, other)


def test_survivors_keep_their_order_and_newcomers_follow() -> None:
    assert in_order_of_seating([D, A, C, B], table(C, A)) == [C, A, B, D]
    assert in_order_of_seating([B, A], None) == [A, B]


def placed(*places: str) -> list[Node]:
    """Nodes a, b, … in a scheduler's order."""
    return [node(chr(97 + rank), node_rank=rank, topology=place) for rank, place in enumerate(places)]


@pytest.mark.parametrize(
    ("places", "order"),
    [
        (("", "", ""), "abc"),
        (("x", "w", "x", "", "w"), "acbed"),
        # The halves of a rack stay together, and the rack.
        (("r1.s1", "r2.s1", "r1.s2", "r1.s1", "r2.s1", "r1"), "adcfbe"),
    ],
)
def test_nodes_of_one_part_of_the_network_have_neighbouring_ranks(places: tuple[str, ...], order: str) -> None:
    assert (
        "".join(chr(97 + each.node_rank) for each in by_topology(in_order_of_seating(placed(*places), None))) == order
    )


def test_racks_come_in_the_order_of_their_numbers() -> None:
    nodes = [node(letter, topology=place) for letter, place in (("a", "r10"), ("b", "r9.s2"), ("c", "r9.s1"))]

    assert [each.topology for each in in_order_of_seating(nodes, None)] == ["r9.s1", "r9.s2", "r10"]


def test_a_lost_nodes_seat_goes_to_its_own_group_and_the_other_ranks_stay() -> None:
    a, b, c, d, spare_of_x, spare_of_w = placed("x", "x", "w", "w", "x", "w")

    seating = seat(table(a, b, c, d), in_order_of_seating([a, b, c, spare_of_x, spare_of_w], table(a, b, c, d)), 4)

    assert seating.nodes == (a, b, c, spare_of_w)
    seating = seat(table(a, b, c, d), in_order_of_seating([a, c, d, spare_of_w], table(a, b, c, d)), 4)
    assert by_topology(seating.nodes) == [a, c, d, spare_of_w]
    seating = seat(table(a, b, c, d), in_order_of_seating([a, c, d, spare_of_x], table(a, b, c, d)), 4)
    assert by_topology(seating.nodes) == [a, spare_of_x, c, d]


def test_the_roles_of_vacant_seats_come_back_from_the_store() -> None:
    written = table(A, vacant=("ps,trainer", "trainer", "trainer"))

    assert decode_table(encode_table(written)) == written


def losing(lost: Node, *others: Node, spare: Node, nodes_min: int) -> World:
    """A job that lost a node while a spare of another role was there."""
    world = World(replace(TERMS, nodes_min=nodes_min, nodes_max=len(others) + 1), first=others[0])
    world.join(*others, lost)
    world.seal()
    world.join(spare)
    world.lose(lost)
    world.lead()
    world.join(*others, spare)
    return world


def lost(name: str) -> str:
    return f"host-{name} was lost: no heartbeat from the elaunch that ran there"


def test_the_leader_names_the_role_that_it_waits_for() -> None:
    world = losing(B, A, spare=D, nodes_min=2)

    assert world.poll().waiting == (
        f"a node with the role trainer; nodes: 1 of 2 is here (gives up after 600 s); {lost('b')}"
    )
    world.join(C)
    assert world.seal() == "ac"


def test_a_job_with_too_few_nodes_names_the_vacant_role_of_which_others_are_there() -> None:
    world = losing(C, A, B, spare=D, nodes_min=3)

    waiting = world.poll().waiting
    assert waiting == f"a node with the role trainer; nodes: 2 of 3 are here (gives up after 600 s); {lost('c')}"


def test_a_table_with_a_vacant_seat_has_its_role() -> None:
    world = losing(C, A, B, spare=D, nodes_min=2)

    assert world.seal() == "ab"
    assert world.table.vacant == ("trainer",)


def test_a_job_for_which_no_node_of_the_role_comes_ends_with_a_sentence() -> None:
    world = losing(A, B, C, spare=node("e"), nodes_min=1)
    world.poll()

    world.now_s += 601
    world.lead()

    assert world.ended == (
        "after 600 s the job still waits for a node with the role ps; nodes: 2 of at least 1 are here;"
        f" {lost('a')}; start a node with that role, or raise --rdzv-conf join_timeout=SECONDS"
    )


def test_a_host_with_a_digit_that_is_no_number_has_its_place() -> None:
    hosts = ["gpu1²", "gpu10", "gpu2", "²"]

    assert [n.host for n in in_order_of_seating([node("a", host=host) for host in hosts], None)] == [
        "gpu1²",
        "gpu2",
        "gpu10",
        "²",
    ]


def test_a_new_free_seat_is_for_a_node_of_any_role() -> None:
    assert seat(None, [node("a")], 2).has_seat_for(replace(node("b"), role="ps"))
    assert not seat(None, [node("a")], 1).has_seat_for(node("b"))
