"""rendezvous.rules.snapshot: a rank table as compact text."""

from __future__ import annotations

import json
import random

import pytest

from elaunch.rendezvous.rules.snapshot import decode_table, encode_table, seats_of
from elaunch.rendezvous.types import RankTable, Seat

TABLE = RankTable(
    generation=12,
    seats=seats_of(
        [
            ("node-a-0000000a", 8, "trainer"),
            ("node-b-0000000b", 8, "trainer"),
            ("node-c-0000000c", 4, "trainer"),
            ("node-d-0000000d", 4, "reader"),
        ]
    ),
    master_addr="fd00::1",
    master_port=29500,
    reason="restart 2 of 3: é \ud800",
    restarts=2,
    restart_ages_s=(30.5, 0.0),
    barren=1,
    progressed=True,
)


def test_seats_have_ranks_without_holes() -> None:
    assert seats_of([("a-1", 2, "x"), ("b-1", 3, "y"), ("c-1", 1, "x")]) == (
        Seat("a-1", 2, 0, "x"),
        Seat("b-1", 3, 2, "y"),
        Seat("c-1", 1, 5, "x"),
    )


def of_nodes(count: int) -> RankTable:
    nodes = [(f"gpu-{n:04}-{random.Random(n).getrandbits(32):08x}", 8, "default") for n in range(count)]
    return RankTable(7, seats_of(nodes), "10.0.0.1", 29500, "restart 1 of 3", restarts=1)


def test_a_table_of_a_thousand_nodes_is_below_12_kb_and_that_of_a_hundred_can_be_read_by_people() -> None:
    large = encode_table(of_nodes(1024))

    assert len(large.encode()) < 12_000
    assert decode_table(large) == of_nodes(1024)
    assert decode_table(large).world_size == 8192
    assert json.loads(encode_table(of_nodes(100)))["nodes"][0].startswith("gpu-0000-")


@pytest.mark.parametrize("text", ["", "{", "null", "3", "[]", '"text"', "{}"])
def test_what_is_no_table_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match="not a rank table: ") as caught:
        decode_table(text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 3),
        ("nodes", "node-a-0000000a"),
        ("nodes", ["a-0000000a"] * 4),
        ("slots", ["8", 8, 4, 4]),
        ("slots", [8, 8, 4, 0]),
        ("slots", [8]),
        ("slots", None),
        ("roles", ["default", "default", "default", 5]),
        ("generation", None),
        ("restarts", "many"),
        ("restart_ages_s", 3),
    ],
)
def test_a_table_with_a_field_that_does_not_fit_is_refused(field: str, value: object) -> None:
    record = {**json.loads(encode_table(TABLE)), field: value}

    with pytest.raises(ValueError, match="not a rank table: "):
        decode_table(json.dumps(record))
