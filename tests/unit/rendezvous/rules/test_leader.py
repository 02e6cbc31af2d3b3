"""rendezvous.rules.leader: the leader's rules while a generation runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.leader import Lead, LeaderState, lead
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.transactions import repair
from elaunch.rendezvous.store import Delete, Put, Txn, Unchanged
from elaunch.rendezvous.types import Failure, FailureKind, Generation, OpenKind, Outcome, OutcomeKind, Terms
from tests.unit.agent.job_world import KEYS, TERMS, TIMES, A, B, C, D, World, forming, running


def admit(world: World) -> None:
    """Nodes wait for a seat; let the leader gather them."""
    assert world.poll().wake_s == world.now_s + TIMES.join_gather_s
    world.now_s += TIMES.join_gather_s
    assert world.lead()


def test_nothing_happens_while_all_is_well() -> None:
    led = running(A, B, C).poll()

    assert (led.txn, led.wake_s, led.waiting) == (None, None, "")


# --- success


def test_all_done_ends_the_job_in_success() -> None:
    world = running(A, B)

    world.finish(A)
    one = world.lead()
    world.finish(B)
    both = world.lead()

    ended = world.snapshot.ended
    assert (one, both) == (False, True)
    assert ended
    assert (ended.kind, ended.exit_code, ended.failure) == (OutcomeKind.SUCCEEDED, 0, None)
    assert ended.reason == "every worker exited with 0"


def test_success_is_written_by_who_leads_still() -> None:
    world = running(A, B)
    world.finish(A, B)
    late = world.poll().txn
    world.lose(A)
    world.elect(B)

    assert late
    assert not world.commit(late)
    assert world.lead()


def test_spares_have_no_part_in_success() -> None:
    world = running(A, terms=Terms())
    world.join(B)
    world.finish(A)

    assert world.lead()


# --- loss


def test_a_seated_node_whose_lease_ended_is_lost() -> None:
    world = running(A, B, C)
    world.lose(B, C)

    assert world.lead()

    assert (world.number, world.generation.kind) == (1, OpenKind.LOSS)
    assert world.generation.cause == "host-b, host-c were lost: no heartbeat from the elaunch that ran there"


def test_a_spare_that_is_lost_is_no_loss() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=2))
    world.join(C)
    world.lose(C)

    assert world.poll().txn is None


def test_a_finished_nodes_death_restarts_no_other() -> None:
    world = running(A, B)
    world.finish(B)
    world.lose(B)

    assert world.poll().txn is None
    world.finish(A)
    assert world.lead()
    assert world.snapshot.ended


def test_a_leader_that_was_cut_off_declares_no_node_lost_immediately() -> None:
    world = running(A, B)
    world.lossless_until_s = world.now_s + TIMES.return_grace_s
    world.lose(B)

    early = world.poll()
    world.now_s += TIMES.return_grace_s

    assert (early.txn, early.wake_s) == (None, world.lossless_until_s)
    assert world.lead()
    assert world.generation.kind is OpenKind.LOSS


# --- a failure whose node could not open a generation


def test_a_failure_that_opened_no_generation_is_opened_by_the_leader() -> None:
    world = running(A, B)
    failure = Failure(FailureKind.SIGNAL, 0, B.node_id, B.host, 1, 0, 17, -9, "was killed by SIGKILL")
    world.write(Put(KEYS.failure(0, B.node_id), encode(failure)))

    assert world.lead()

    assert world.snapshot.generation == Generation(1, OpenKind.FAIL, failure.sentence, B.node_id)


# --- join


def test_nodes_that_come_together_join_in_one_generation() -> None:
    world = running(A)
    world.join(C)
    first = world.poll()
    world.now_s += TIMES.join_gather_s / 2
    world.join(B)
    second = world.poll()
    world.now_s = first.wake_s or 0.0

    assert world.lead()

    assert (first.txn, second.txn, second.wake_s) == (None, None, first.wake_s)
    assert (world.generation.kind, world.generation.cause) == (OpenKind.JOIN, "host-b, host-c join")


def full() -> World:
    world = running(A, B, C)
    world.join(D)
    return world


def finishing() -> World:
    world = running(A, B)
    world.finish(B)
    world.join(C)
    return world


def without_restarts() -> World:
    world = running(A, terms=replace(TERMS, max_restarts=0))
    world.join(B)
    return world


def not_ready() -> World:
    world = running(A)
    world.write(Put(KEYS.member(B.node_id), encode(B)))
    return world


def evicted() -> World:
    world = running(A)
    world.join(B)
    world.evict(B)
    return world


@pytest.mark.parametrize("made", [full, finishing, without_restarts, not_ready, evicted])
def test_no_generation_is_opened_for_nodes_that_could_not_join_it(made: Callable[[], World]) -> None:
    world = made()

    assert (world.poll().txn, world.poll().wake_s) == (None, None)


def test_a_loss_goes_before_a_join() -> None:
    world = running(A, B)
    world.join(C)
    world.lose(B)

    assert world.lead()
    assert world.generation.kind is OpenKind.LOSS


def test_nodes_that_come_and_go_cost_the_others_less_and_less_often() -> None:
    world = running(A)
    waited_s = []

    for _ in range(9):
        world.join(B)
        since_s = world.now_s
        wake_s = world.poll().wake_s
        assert wake_s is not None
        waited_s.append(round(wake_s - since_s, 3))
        world.now_s = wake_s
        assert world.lead()
        world.run(A, B)
        world.lose(B)
        world.lead()
        world.run(A)

    assert waited_s[:5] == [0.1, 1.0, 2.0, 4.0, 8.0]
    assert waited_s[-2:] == [60.0, 60.0]


def test_after_a_quiet_time_a_newcomer_is_let_in_soon_again() -> None:
    world = running(A, B, terms=replace(TERMS, nodes_max=9))
    for who, then in ((C, (A, B, C)), (D, (A, B, C, D))):
        world.join(who)
        world.now_s = world.poll().wake_s or 0.0
        world.lead()
        world.run(*then)
    assert world.leader_state.join_interval_s == 2.0
    world.lose(D)
    world.lead()
    world.run(A, B, C)
    world.now_s += 100

    world.join(D)
    admit(world)

    assert world.leader_state.join_interval_s == TIMES.join_backoff_min_s


# --- nothing to lead


def test_nothing_is_written_after_the_end() -> None:
    world = running(A, B)
    world.write(Put(KEYS.ended, encode(Outcome(OutcomeKind.FAILED, "cancelled", 0, 0, 3))))
    world.lose(B)

    assert world.poll().txn is None


def test_nothing_is_written_where_there_is_no_job() -> None:
    assert lead(Snapshot(KEYS, 5, whole=True), LeaderState(), TIMES, 0.0, 0.0, 0.0).txn is None


@pytest.mark.parametrize("joined", [False, True])
def test_what_a_leader_waits_for_while_one_forms_is_forgotten_when_it_runs(joined: bool) -> None:
    world = running(A)
    if joined:
        world.join(B)
        world.poll()
        assert world.leader_state.ready_since_s is not None
        world.lose(B)

    world.poll()

    assert world.leader_state.ready_since_s is None


# --- broken records


def test_a_nodes_broken_record_is_restored_once_then_deleted_and_one_of_the_job_is_restored_alone() -> None:
    snapshot = running(A, B).snapshot
    key = KEYS.done(0, B.node_id)
    of_node, of_job = Put(key, "good", 9), Put(KEYS.generation, "good", 9)

    def led(restored: Put, leader_state: LeaderState) -> Lead:
        broken = replace(snapshot, repairs=((Unchanged(restored.key, 7), restored),))
        return lead(broken, leader_state, TIMES, 100.0, 0.0, 0.0)

    first = led(of_node, LeaderState())
    second = led(of_node, first.leader_state)
    of_job_first = led(of_job, LeaderState())

    assert first.txn == Txn((*snapshot.leader_guards, Unchanged(key, 7)), (of_node,))
    assert second.txn == Txn((*snapshot.leader_guards, Unchanged(key, 7)), (Delete(key),))
    assert of_job_first.txn
    assert of_job_first.txn.then == (of_job,)
    assert led(of_job, of_job_first.leader_state).txn is None


@pytest.mark.parametrize(("forms", "opens"), [(True, True), (False, False)])
def test_a_joined_nodes_record_that_is_deleted_opens_the_next_generation_while_one_forms(
    forms: bool, opens: bool
) -> None:
    world = forming(A, B) if forms else running(A, B)
    key = KEYS.member(B.node_id)

    txn = repair(world.snapshot, Unchanged(key, 7), Delete(key))

    assert any(isinstance(op, Put) and op.key == KEYS.generation for op in txn.then) is opens
