"""Nodes whose torch or Python differ, from their joining to the table."""

from __future__ import annotations

import json

import pytest

from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.form_generation import _mismatch
from elaunch.rendezvous.rules.snapshot import decode_table, encode_table
from elaunch.rendezvous.types import Joined, Node
from tests.unit.agent.job_world import TERMS, A, B, World

OLD, NEW = "torch 2.12.1+cpu, Python 3.11", "torch 2.13.0+cpu, Python 3.11"


def formed(*software: str) -> str:
    """What the table of a job says whose nodes joined with these words."""
    world = World(TERMS)
    for who, words in zip((A, B), software, strict=True):
        joined = Joined(who.node_id, 1, software=words)
        is_member = who.node_id in world.snapshot.members
        world.commit(transactions.join(world.snapshot, who, joined, world.lease(who), is_member=is_member))
    world.run()
    assert world.seated == "ab"
    return world.table.mismatch


@pytest.mark.parametrize("software", [(NEW, NEW), (NEW, ""), ("", "")])
def test_nodes_that_are_alike_or_unknown_are_not_worth_a_word(software: tuple[str, str]) -> None:
    assert formed(*software) == ""


def test_seated_nodes_that_differ_are_in_the_table() -> None:
    assert formed(NEW, OLD) == f"the nodes have different software: {OLD} on host-b; {NEW} on host-a"


def test_the_kinds_are_named_with_their_hosts_the_most_common_first() -> None:
    def said(*software: str) -> str:
        nodes = [Node(f"h{index}-0000000{index}", f"h{index}", "", 1) for index in range(len(software))]
        joined = {n.node_id: Joined(n.node_id, 1, software=words) for n, words in zip(nodes, software, strict=True)}
        return _mismatch(nodes, joined)

    assert (
        said(OLD, *[NEW] * 5, "") == f"the nodes have different software: {NEW} on h1, h2, h3 and 2 more; {OLD} on h0"
    )
    assert said(*(f"torch {index}" for index in range(5))).endswith("torch 2 on h2; and others")


def test_a_table_keeps_it_as_text_and_is_no_longer_without_it() -> None:
    world = World(TERMS)
    world.run(A)

    assert "mismatch" not in json.loads(encode_table(world.table))
    text = encode_table(world.table).replace('"barren"', '"mismatch":"they differ","barren"')
    assert decode_table(text).mismatch == "they differ"
    assert decode_table(encode_table(decode_table(text))).mismatch == "they differ"
    assert decode_table(text.replace("they differ", "\\u001b[2J")).mismatch == "\\x1b[2J"


def test_a_table_has_the_first_nodes_secret() -> None:
    world = World(TERMS)
    for who, secret in ((A, "s1"), (B, "s2")):
        joined = Joined(who.node_id, 1, secret=secret)
        is_member = who.node_id in world.snapshot.members
        world.commit(transactions.join(world.snapshot, who, joined, world.lease(who), is_member=is_member))
    world.run()

    assert (world.table.secret, decode_table(encode_table(world.table)).secret) == ("s1", "s1")
