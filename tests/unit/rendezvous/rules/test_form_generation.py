"""rendezvous.rules.form_generation: what a leader writes, and what that stands on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.restart_policy import decisive_failure
from elaunch.rendezvous.rules.snapshot import SnapshotReader, encode_table, seats_of
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import (
    FailureKind,
    Generation,
    Joined,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    Seat,
    Terms,
)
from tests.unit.agent.job_world import KEYS, PORT, TERMS, TIMES, A, B, C, World, forming, running

SIGNAL = FailureKind.SIGNAL


# --- the first table


def test_the_first_table_says_who_has_which_ranks_and_where_they_meet() -> None:
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
    world.look()
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
    late = world.look().txn
    assert late
    match meanwhile:
        case "the generation moved":
            world.write(Put(KEYS.generation, encode(Generation(2, OpenKind.LOSS, "moved"))))
        case "the job ended":
            world.write(Put(KEYS.ended, "x"))
        case "another leads":
            world.write(Put(KEYS.leader, B.node_id))
        case _:
            # Whoever sealed it had that node's word.
            seats = seats_of([(B.node_id, 2, "default")])
            world.write(Put(KEYS.table(1), encode_table(RankTable(1, seats, "b", 1, "sealed"))))
            world.write(Put(KEYS.joined(1, B.node_id), encode(Joined(B.node_id, 1))))
    before = world.store.read(KEYS.root).entries

    assert not world.commit(late)
    assert world.store.read(KEYS.root).entries == before


def test_a_table_is_not_sealed_over_a_word_that_came_after_the_look() -> None:
    world = running(A, B)
    world.fail(SIGNAL)
    world.join(A, B)
    late = world.look().txn
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
def test_at_the_end_what_somebody_may_still_read_stays_and_nothing_else(kind: OutcomeKind) -> None:
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


def test_a_first_failure_that_the_outcome_tells_of_is_not_kept_twice() -> None:
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
