"""rendezvous.rules.transactions: what a node writes about itself and what the leader writes, on a memory store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.transactions import hosts, open_join, open_loss
from elaunch.rendezvous.store import Put, Txn
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    Terms,
)
from tests.unit.agent.job_world import KEYS, TERMS, A, B, C, World, forming, node, running

FAILED = Failure(FailureKind.SIGNAL, 0, B.node_id, B.host, 1, 0, 17, -9, "was killed by SIGKILL")
INTERRUPTED = Outcome(OutcomeKind.INTERRUPTED, "SIGINT was received", 0, 0, 3, signum=2)


# --- a run


def test_the_first_agent_starts_a_run_and_leads_it() -> None:
    snapshot = World().snapshot

    assert snapshot.terms == TERMS
    assert (snapshot.leader, snapshot.members) == (A.node_id, {A.node_id: A})
    assert snapshot.generation == Generation(0, OpenKind.START, "the job starts")
    assert snapshot.table is None


def test_a_run_on_an_id_that_was_used_keeps_nothing_of_the_last_one_but_counts_on() -> None:
    world = forming(A, B)
    world.write(Put(KEYS.ended, encode(INTERRUPTED)), Put(KEYS.done(0, A.node_id), ""))
    world.lose(A, B)

    assert world.start(C)

    snapshot = world.snapshot
    assert snapshot.generation == Generation(2, OpenKind.START, "the job starts")
    assert (snapshot.members, snapshot.leader) == ({C.node_id: C}, C.node_id)
    assert (snapshot.tables, snapshot.joined, snapshot.failures, snapshot.done) == ({}, {}, {}, {})
    assert snapshot.ended is None


def test_a_run_that_has_members_is_not_swept_away() -> None:
    world = running(A)
    world.write(Put(KEYS.ended, encode(INTERRUPTED)))

    assert not world.start(C)
    assert world.snapshot.ended == INTERRUPTED


def test_a_run_that_was_started_and_left_meanwhile_is_not_started_from_an_old_snapshot() -> None:
    world = running(A)
    world.lose(A)
    late = transactions.start_run(world.snapshot, TERMS, C, world.lease(C))
    assert world.start(B)
    world.lose(B)

    assert not world.commit(late)


# --- members


def test_a_member_whose_key_is_gone_is_refused_and_not_made_a_member_again() -> None:
    world = forming(A, B)
    world.evict(B)

    held = world.commit(transactions.join(world.snapshot, B, Joined(B.node_id, 1), world.lease(B), is_member=True))

    assert not held
    assert B.node_id not in world.snapshot.members


def test_a_node_whose_lease_ended_comes_back_while_its_generation_is_the_newest() -> None:
    world = running(A, B)
    snapshot = world.snapshot
    world.lose(B)

    assert world.commit(transactions.return_as_member(snapshot, B, world.lease(B)))
    assert world.snapshot.members[B.node_id] == B
    world.fail(FailureKind.SIGNAL)
    assert not world.commit(transactions.return_as_member(snapshot, B, world.lease(B)))


# --- leading


def test_any_member_may_lead_where_none_does() -> None:
    world = running(A, B)

    taken = world.elect(B)
    world.lose(A)

    assert (taken, world.elect(B)) == (False, True)
    assert world.snapshot.leader == B.node_id


def test_who_is_no_member_does_not_lead() -> None:
    world = running(A, B)
    world.lose(A)

    assert not world.elect(C)
    assert world.snapshot.leader == ""


# --- failures


def test_a_failure_opens_the_next_generation_and_is_its_cause() -> None:
    world = running(A, B)

    assert world.commit(transactions.fail(world.snapshot, B, FAILED))

    assert world.generation == Generation(1, OpenKind.FAIL, FAILED.sentence, B.node_id)
    assert world.snapshot.failures == {0: (FAILED,)}


def test_the_later_of_two_failures_is_recorded_and_opens_nothing() -> None:
    world = running(A, B)
    snapshot = world.snapshot
    mine = replace(FAILED, node_id=A.node_id)

    held = [world.commit(transactions.fail(snapshot, who, f)) for who, f in ((B, FAILED), (A, mine))]

    assert held == [True, False]
    assert world.generation.number == 1
    assert world.snapshot.failures == {0: (FAILED, mine)}


@pytest.mark.parametrize("kind", [OpenKind.JOIN, OpenKind.LEAVE])
def test_a_failure_over_a_generation_that_was_to_let_workers_save_opens_another(kind: OpenKind) -> None:
    world = running(A, B)
    world.write(Put(KEYS.generation, encode(Generation(1, kind, "host-c joins"))))

    world.commit(transactions.fail(world.snapshot, B, FAILED))

    assert world.generation == Generation(2, OpenKind.FAIL, FAILED.sentence, B.node_id)
    assert set(world.snapshot.failures) == {0}


@pytest.mark.parametrize(
    "opened",
    [
        *(Generation(1, kind, "rank 9 failed") for kind in (OpenKind.FAIL, OpenKind.LOSS)),
        # As that of an agent which hung, or was cut off, while others restarted without it.
        Generation(1, OpenKind.START, ""),
        Generation(2, OpenKind.JOIN, "host-c joins"),
    ],
)
def test_a_failure_over_a_generation_that_is_urgent_or_that_others_have_followed_is_recorded_only(
    opened: Generation,
) -> None:
    world = running(A, B)
    world.write(Put(KEYS.generation, encode(opened)))

    world.commit(transactions.fail(world.snapshot, B, FAILED))

    assert world.generation == opened
    assert world.snapshot.failures == ({} if opened.kind is OpenKind.START else {0: (FAILED,)}), "nor in another run's"


def test_a_failure_after_the_end_opens_nothing() -> None:
    world = running(A, B)
    snapshot = world.snapshot
    world.write(Put(KEYS.ended, encode(INTERRUPTED)))

    assert not world.commit(transactions.fail(snapshot, B, FAILED))
    assert world.generation.number == 0


def test_a_completed_record_keeps_its_place_in_the_order() -> None:
    world = running(A, B)
    world.commit(transactions.fail(world.snapshot, B, FAILED))
    world.commit(transactions.fail(world.snapshot, A, replace(FAILED, node_id=A.node_id)))
    whole = replace(FAILED, tail="its last lines")

    assert world.commit(transactions.complete(world.snapshot, B, whole))

    assert [f.node_id for f in world.snapshot.failures[0]] == [B.node_id, A.node_id]
    assert world.snapshot.failures[0][0] == whole


LONG = replace(FAILED, kind=FailureKind.EXCEPTION, traceback="a line\n" * 9000, tail="a word\n" * 9000)


def test_the_transaction_that_opens_a_generation_carries_no_traceback_and_no_output() -> None:
    world = running(A, B)

    world.commit(transactions.fail(world.snapshot, B, LONG))

    assert world.snapshot.failures[0] == (replace(LONG, traceback="", tail=""),)


def test_a_generation_records_whether_another_failure_may_explain_its_cause() -> None:
    for kind in (FailureKind.PEER_LOST, FailureKind.SIGNAL):
        world = running(A, B)
        world.commit(transactions.fail(world.snapshot, A, replace(FAILED, kind=kind)))
        assert world.generation.is_secondary is (kind is FailureKind.PEER_LOST)


# --- leaving, ending


@pytest.mark.parametrize("who", [A, B])
def test_a_seated_node_that_leaves_opens_a_generation(who: Node) -> None:
    world = running(A, B)

    world.leave(who)

    snapshot = world.snapshot
    assert world.generation == Generation(1, OpenKind.LEAVE, f"{who.host} leaves (SIGTERM was received)", who.node_id)
    assert who.node_id not in snapshot.members
    assert who.node_id not in snapshot.joined[0]
    assert snapshot.leader == A.node_id


def test_a_former_leader_cannot_take_the_lead_from_its_successor() -> None:
    world = running(A, B)
    old = world.snapshot
    world.commit(transactions.resign(old))
    world.commit(transactions.become_leader(world.snapshot, B, world.lease(B)))

    world.commit(transactions.resign(old))

    assert world.snapshot.leader == B.node_id


def test_who_leaves_as_another_opens_is_gone_all_the_same() -> None:
    world = running(A, B)
    snapshot = world.snapshot
    world.fail(FailureKind.SIGNAL)

    world.commit(transactions.leave(snapshot, B, opens=True, why="SIGTERM was received"))

    assert world.generation.kind is OpenKind.FAIL
    assert B.node_id not in world.snapshot.members


def test_a_node_that_leaves_a_later_generation_deletes_its_join() -> None:
    world = forming(A, B)
    world.run(A, B)

    world.leave(B)

    assert set(world.snapshot.joined[1]) == {A.node_id}


def test_a_spare_that_leaves_opens_nothing() -> None:
    world = running(A, terms=Terms())
    world.join(B)

    world.leave(B)

    assert world.generation.number == 0
    assert B.node_id not in world.snapshot.members


def test_a_person_ends_a_job_whatever_is_formed_meanwhile() -> None:
    world = running(A, B)
    end = transactions.end_job(world.snapshot, INTERRUPTED)
    world.fail(FailureKind.SIGNAL)

    assert world.commit(end)
    assert world.snapshot.ended == INTERRUPTED


JOINED = Joined(B.node_id, 1)
OF_B: dict[str, Callable[[Snapshot, int], Txn]] = {
    "join": lambda seen, lease: transactions.join(seen, B, JOINED, lease, is_member=False),
    "join as a member": lambda seen, lease: transactions.join(seen, B, JOINED, lease, is_member=True),
    "return": lambda seen, lease: transactions.return_as_member(seen, B, lease),
    "lead": lambda seen, lease: transactions.become_leader(seen, B, lease),
    "done": lambda seen, lease: transactions.report_done(seen, B, 0),
    "complete": lambda seen, lease: transactions.complete(seen, B, replace(FAILED, tail="last lines")),
    "end": lambda seen, lease: transactions.end_job(seen, INTERRUPTED),
}


@pytest.mark.parametrize("what", OF_B)
def test_once_the_job_has_ended_a_node_writes_nothing_more(what: str) -> None:
    world = running(A, B)
    world.lose(A)
    txn = OF_B[what](world.snapshot, world.lease(B))
    world.write(Put(KEYS.ended, encode(replace(INTERRUPTED, reason="cancelled"))))
    before = world.store.read(KEYS.root).entries

    assert not world.commit(txn)
    assert world.store.read(KEYS.root).entries == before


@pytest.mark.parametrize("what", ["join", "join as a member", "return", "done"])
def test_once_the_generation_moved_a_node_writes_nothing_for_the_one_before(what: str) -> None:
    world = running(A, B)
    txn = OF_B[what](world.snapshot, world.lease(B))
    world.fail(FailureKind.SIGNAL)
    before = world.store.read(KEYS.root).entries

    assert not world.commit(txn)
    assert world.store.read(KEYS.root).entries == before


def test_once_the_job_has_ended_who_leaves_opens_nothing() -> None:
    world = running(A, B)
    leave = transactions.leave(world.snapshot, B, opens=True, why="SIGTERM was received")
    world.write(Put(KEYS.ended, encode(INTERRUPTED)))

    world.commit(leave)

    assert world.generation.number == 0
    assert B.node_id not in world.snapshot.members


def test_every_key_of_a_run_stands_on_a_nodes_lease_or_on_the_runs() -> None:
    world = running(A, B)
    world.finish(A)
    world.commit(transactions.fail(world.snapshot, B, LONG))
    world.commit(transactions.complete(world.snapshot, B, LONG))
    world.run(A, B)
    world.leave(B)
    world.commit(transactions.end_job(world.snapshot, INTERRUPTED))

    leases = {key: entry.lease for key, entry in world.store.read(KEYS.root).entries.items()}
    assert set(leases.values()) == {world.snapshot.lease, world.lease(A)}
    assert leases[KEYS.ended] == leases[KEYS.generation] == leases[KEYS.spec] == world.snapshot.lease


def test_the_lease_of_a_run_belongs_to_one_start_and_cannot_be_guessed() -> None:
    world = running(A)
    first = world.snapshot.lease

    def meant(snapshot: Snapshot, who: Node, lease: int) -> int:
        return transactions.run_lease(KEYS, transactions.start_run(snapshot, TERMS, who, lease))

    again = meant(Snapshot(KEYS), A, world.lease(A))
    # By another node, on another lease, and of another run; and what follows from the job's name alone.
    others = {meant(Snapshot(KEYS), B, world.lease(A)), meant(Snapshot(KEYS), A, 99)}
    guessed = int.from_bytes(hashlib.sha256(f"{KEYS.root}0".encode()).digest()[:8], "big") >> 1
    world.lose(A)
    others |= {meant(world.snapshot, A, 1), guessed}

    assert again == first
    assert len({0, first, *others}) == 6
    assert transactions.run_lease(KEYS, transactions.report_done(world.snapshot, B, 0)) == 0
    assert 0 < first < 1 << 63


def test_a_member_key_that_was_made_again_meanwhile_is_a_node_that_lives() -> None:
    world = running(A, B, C)
    world.lose(B, C)
    loss = open_loss(world.snapshot, [B.node_id, C.node_id])
    world.join(C)

    assert not world.commit(loss)
    assert world.generation.number == 0


def test_a_node_that_is_done_is_not_lost() -> None:
    world = running(A, B)
    world.lose(B)
    loss = open_loss(world.snapshot, [B.node_id])
    world.write(Put(KEYS.done(0, B.node_id), ""))

    assert not world.commit(loss)


@pytest.mark.parametrize("what", ["another leads", "the generation moved", "the job ended"])
def test_a_generation_is_opened_by_who_leads_the_newest_of_a_job_that_lives(what: str) -> None:
    world = running(A, B, C)
    world.lose(C)
    both = [open_loss(world.snapshot, [C.node_id]), open_join(world.snapshot, [node("d").node_id])]
    if what == "another leads":
        world.write(Put(KEYS.leader, B.node_id))
    elif what == "the generation moved":
        world.fail(FailureKind.SIGNAL)
    else:
        world.write(Put(KEYS.ended, "x"))

    assert [world.commit(txn) for txn in both] == [False, False]


def test_a_join_needs_the_table_that_it_is_to_grow() -> None:
    world = running(A)
    world.join(B)
    join = open_join(world.snapshot, [B.node_id])

    assert world.commit(join)
    assert world.generation == Generation(1, OpenKind.JOIN, "host-b joins")
    assert not world.commit(open_join(world.snapshot, [B.node_id])), "while that forms, no other joins"


@pytest.mark.parametrize("meanwhile", ["a node is done", "the newcomer has gone"])
def test_no_generation_is_opened_for_newcomers_once_a_node_is_done_or_they_have_gone(meanwhile: str) -> None:
    world = running(A, B)
    world.join(C)
    join = open_join(world.snapshot, [C.node_id])
    if meanwhile == "a node is done":
        world.finish(B)
    else:
        world.lose(C)

    assert not world.commit(join)


@pytest.mark.parametrize(
    ("kind", "forms", "cause"),
    [
        (OpenKind.LEAVE, True, "host-b leaves; host-c left too, or was lost"),
        (OpenKind.JOIN, True, "host-c was lost: no heartbeat from the elaunch that ran there"),
        (OpenKind.LEAVE, False, "host-c was lost: no heartbeat from the elaunch that ran there"),
    ],
    ids=["while it forms", "another kind", "after it was sealed"],
)
def test_who_is_gone_while_a_generation_forms_since_one_left_may_have_left_too(
    kind: OpenKind, forms: bool, cause: str
) -> None:
    world = running(A, B, C)
    number = 1 if forms else 0
    world.write(Put(KEYS.generation, encode(Generation(number, kind, "host-b leaves", B.node_id))))
    world.lose(C)

    assert world.commit(open_loss(world.snapshot, [C.node_id]))
    assert world.generation == Generation(number + 1, OpenKind.LOSS, cause)


@pytest.mark.parametrize(
    ("letters", "names"),
    [
        ("a", "host-a"),
        ("cab", "host-a, host-b, host-c"),
        ("abcde", "host-a, host-b, host-c and 2 more"),
    ],
)
def test_hosts_are_named_in_order_and_not_all_of_very_many(letters: str, names: str) -> None:
    assert hosts([node(letter).node_id for letter in letters]) == names
