"""rendezvous.rules.roles: which role each worker of a node has, and its place among all workers of that role."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.rules.assign_ranks import counts_in, role_of, role_place, role_sizes
from elaunch.rendezvous.rules.table_codec import decode_table, encode_table, seats_of
from elaunch.rendezvous.types import RankTable

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


def test_a_table_carries_the_roles_to_all_nodes() -> None:
    table = RankTable(0, MIXED, "a", 1, "the job starts")

    assert decode_table(encode_table(table)).seats == MIXED
