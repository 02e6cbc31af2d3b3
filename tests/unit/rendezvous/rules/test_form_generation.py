"""rendezvous.rules.form_generation: what a leader writes, on which evidence, and who has which ranks (rule 5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.form_generation import _other_software
from elaunch.rendezvous.rules.restart_policy import decisive_failure
from elaunch.rendezvous.rules.snapshot import SnapshotReader, decode_table, encode_table, seats_of
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import (
    FailureKind,
    Generation,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    Seat,
    Terms,
)
from tests.unit.agent.job_world import KEYS, PORT, TERMS, TIMES, A, B, C, World, forming, node, running

SIGNAL = FailureKind.SIGNAL


def test_the_first_table_has_the_ranks_and_their_address() -> None:
    world = World(replace(TERMS, nodes_max=2))
    world.join(B, A)

    assert world.lead()

    assert world.table == RankTable(
        0,
        (Seat(A.node_id, 1, 0), Seat(B.node_id, 2, 1)),
        master_addr=A.address,
        master_port=PORT + A.slots,
        reason="the job starts",
    )
    assert world.table.world_size == 3


def evicting() -> World:
    world = forming(A, B)
    world.join(A)
    world.poll()
    world.now_s += TIMES.form_deadline_s
    return world


def sealing() -> World:
    world = forming(A, B)
    world.join(A, B)
    return world


def ending() -> World:
    world = forming(A, B, terms=Terms(max_restarts=0, nodes_max=2))
    world.join(A, B)
    return world


@pytest.mark.parametrize("about_to", [sealing, ending, evicting])
@pytest.mark.parametrize("meanwhile", ["the generation moved", "the job ended", "another leads", "a table was sealed"])
def test_a_leader_that_is_late_writes_nothing(about_to: Callable[[], World], meanwhile: str) -> None:
    world = about_to()
    late = world.poll().txn
    assert late
    match meanwhile:
        case "the generation moved":
            world.write(Put(KEYS.generation, encode(Generation(2, OpenKind.LOSS, "moved"))))
        case "the job ended":
            world.write(Put(KEYS.ended, "x"))
        case "another leads":
            world.write(Put(KEYS.leader, B.node_id))
        case _:
            # The other leader had the join of that node.
            seats = seats_of([(B.node_id, 2, "default")])
            world.write(Put(KEYS.table(1), encode_table(RankTable(1, seats, "b", 1, "sealed"))))
            world.write(Put(KEYS.joined(1, B.node_id), encode(Joined(B.node_id, 1))))
    before = world.store.read(KEYS.root).entries

    assert not world.commit(late)
    assert world.store.read(KEYS.root).entries == before


def test_a_table_is_not_sealed_over_a_join_after_the_snapshot() -> None:
    world = running(A, B)
    world.fail(SIGNAL)
    world.join(A, B)
    late = world.poll().txn
    world.join(C)

    assert late
    assert not world.commit(late)
    assert world.seal() == "abc"


def test_sealing_deletes_what_is_older_but_failures() -> None:
    world = running(A, terms=replace(TERMS, nodes_max=1))
    world.finish(A)
    world.fail(SIGNAL)
    world.join(A)

    world.seal()

    snapshot = world.snapshot
    assert (set(snapshot.tables), set(snapshot.joined), set(snapshot.done)) == ({1}, {1}, set())
    assert set(snapshot.failures) == {0}


def test_the_first_failure_and_the_last_one_are_kept() -> None:
    world = running(A, terms=Terms(max_restarts=100))
    for _ in range(5):
        world.fail(SIGNAL)
        world.join(A)
        world.seal()

    assert sorted(world.snapshot.failures) == [0, world.number - 1]


def test_of_a_generation_in_which_many_failed_the_failure_that_it_was_judged_by_stays() -> None:
    world = running(A, B, C)
    world.fail(FailureKind.PEER_LOST, SIGNAL, FailureKind.EXCEPTION)
    judged = decisive_failure(world.snapshot.failures[0])
    assert len(world.snapshot.failures[0]) == 3

    world.run(A, B, C)

    assert judged.kind is SIGNAL
    assert world.snapshot.failures == {0: (judged,)}


def test_a_record_that_came_after_the_next_table_goes_with_the_one_after_that() -> None:
    world = running(A, B, C)
    before = world.snapshot
    world.fail(SIGNAL)
    world.run(A, B, C)
    late = replace(decisive_failure(world.snapshot.failures[0]), node_id=C.node_id)
    world.commit(transactions.complete(before, C, late))
    assert len(world.snapshot.failures[0]) == 2

    world.fail(SIGNAL)
    world.run(A, B, C)

    assert {g: [f.node_id for f in failures] for g, failures in world.snapshot.failures.items()} == {
        0: [A.node_id],
        1: [A.node_id],
    }


@pytest.mark.parametrize("kind", OutcomeKind)
def test_at_the_end_what_may_still_be_read_stays_and_nothing_else(kind: OutcomeKind) -> None:
    world = running(A, B)
    for _ in range(3):
        world.fail(SIGNAL, SIGNAL, nodes=(A, B))
        world.run(A, B)
    world.finish(A)
    first = decisive_failure(world.snapshot.failures[0])

    world.commit(transactions.end_job(world.snapshot, Outcome(kind, "", 3, 3, 3)))

    left = world.store.read(KEYS.root).entries
    members = {KEYS.member(A.node_id), KEYS.member(B.node_id), KEYS.leader}
    read = {KEYS.spec, KEYS.generation, KEYS.ended, KEYS.table(3), KEYS.failure(0, first.node_id)}
    assert set(left) == members | read


def test_a_first_failure_that_the_outcome_contains_is_not_kept_twice() -> None:
    world = running(A, B, terms=replace(TERMS, max_restarts=0))
    world.fail(SIGNAL, SIGNAL, nodes=(A, B))
    world.join(A, B)

    world.seal()

    assert world.snapshot.ended
    assert world.snapshot.ended.failure
    assert world.snapshot.failures == {}


def test_who_ends_the_job_without_having_seen_its_failures_leaves_them_to_the_runs_lease() -> None:
    world = running(A, B)
    world.fail(SIGNAL, SIGNAL, nodes=(A, B))
    narrow = SnapshotReader(KEYS).read(world.store.read(KEYS.control), whole=False)

    world.commit(transactions.end_job(narrow, Outcome(OutcomeKind.INTERRUPTED, "", 1, 1, 3, signum=2)))

    left = world.store.read(KEYS.failure(0)).entries
    assert [entry.lease for entry in left.values()] == [world.snapshot.lease] * 2


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


NEWCOMERS = {
    "as their users requested": (node("a", node_rank=2), node("b", node_rank=0), node("c", node_rank=1)),
    "those with a request first": (node("a"), node("b"), node("c", node_rank=5)),
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


OLD, NEW = "torch 2.12.1+cpu, Python 3.11", "torch 2.13.0+cpu, Python 3.11"


def formed(*details: dict[str, str]) -> RankTable:
    """The table of a job whose nodes joined with these details."""
    world = World(TERMS)
    for who, each in zip((A, B), details, strict=True):
        joined = Joined(who.node_id, 1, **each)
        is_member = who.node_id in world.snapshot.members
        world.commit(transactions.join(world.snapshot, who, joined, world.lease(who), is_member=is_member))
    world.run()
    assert world.seated == "ab"
    return world.table


@pytest.mark.parametrize("software", [(NEW, NEW), (NEW, ""), ("", "")])
def test_nodes_that_are_alike_or_unknown_are_not_mentioned(software: tuple[str, str]) -> None:
    assert formed(*({"software": text} for text in software)).mismatch == ""


def test_seated_nodes_that_differ_are_in_the_table() -> None:
    mismatch = formed({"software": NEW}, {"software": OLD}).mismatch

    assert mismatch == f"the nodes have different software: {OLD} on host-b; {NEW} on host-a"


def test_the_kinds_are_named_with_their_hosts_the_most_common_first() -> None:
    def mismatch(*software: str) -> str:
        nodes = [Node(f"h{index}-0000000{index}", f"h{index}", "", 1) for index in range(len(software))]
        joined = {n.node_id: Joined(n.node_id, 1, software=text) for n, text in zip(nodes, software, strict=True)}
        return _other_software(nodes, joined)

    kinds = f"{NEW} on h1, h2, h3 and 2 more; {OLD} on h0"
    assert mismatch(OLD, *[NEW] * 5, "") == f"the nodes have different software: {kinds}"
    assert mismatch(*(f"torch {index}" for index in range(5))).endswith("torch 2 on h2; and others")


def test_a_table_keeps_it_as_text_and_is_no_longer_without_it() -> None:
    world = World(TERMS)
    world.run(A)

    assert "mismatch" not in json.loads(encode_table(world.table))
    text = encode_table(world.table).replace('"barren"', '"mismatch":"they differ","barren"')
    assert decode_table(text).mismatch == "they differ"
    assert decode_table(encode_table(decode_table(text))).mismatch == "they differ"
    assert decode_table(text.replace("they differ", "\\u001b[2J")).mismatch == "\\x1b[2J"


def test_a_table_has_the_first_nodes_secret() -> None:
    table = formed({"secret": "s1"}, {"secret": "s2"})

    assert (table.secret, decode_table(encode_table(table)).secret) == ("s1", "s1")
