"""rendezvous.rules.form_generation: whether the job goes on, and what is charged to its budget (rules 3, 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.form_generation import counted_restarts
from elaunch.rendezvous.rules.restart_policy import NO_PROGRESS_MAX
from elaunch.rendezvous.types import Failure, FailureKind, Node, OutcomeKind, RankTable, Terms
from tests.unit.agent.job_world import TERMS, TIMES, A, B, C, World, forming, running

SIGNAL = FailureKind.SIGNAL


# --- 3: what is charged to the budget


@pytest.mark.parametrize("nodes", [(A, B), (A, A)], ids=["on another node", "on the same node"])
def test_a_cause_beside_the_first_failure_is_reported_with_the_restart(nodes: tuple[Node, ...]) -> None:
    world = running(A, B)
    world.fail(FailureKind.PEER_LOST, FailureKind.SIGNAL, nodes=nodes)
    world.join(A, B)
    cause = world.snapshot.failures[0][-1].sentence

    world.seal()

    assert (cause.startswith("rank 1 "), world.table.reason) == (True, f"restart 1 of 3; the cause: {cause}")


@pytest.mark.parametrize("made", [running, forming], ids=["alone", "beside a failure"])
def test_a_loss_is_not_charged_and_the_lost_node_is_named(made: Callable[..., World]) -> None:
    world = made(A, B, terms=replace(TERMS, max_restarts=1))
    world.lose(B)
    world.lead()
    world.join(A)

    world.seal()

    assert (world.table.generation, world.table.restarts) == (1, 0)
    assert world.table.reason == "host-b was lost: no heartbeat from the elaunch that ran there"


def test_who_joins_is_not_charged() -> None:
    world = running(A)
    world.join(B)
    world.poll()
    world.now_s += TIMES.join_gather_s
    world.lead()
    world.join(A, B)

    world.seal()

    assert (world.seated, world.table.restarts, world.table.reason) == ("ab", 0, "host-b joins")


@pytest.mark.parametrize(("kind", "charged"), [(FailureKind.PEER_LOST, 0), (FailureKind.SIGNAL, 1)])
def test_a_rank_that_only_lost_a_peer_while_a_join_stopped_the_ranks_is_not_charged(
    kind: FailureKind, charged: int
) -> None:
    world = running(A)
    world.join(B)
    world.poll()
    world.now_s += TIMES.join_gather_s
    world.lead()
    world.fail(kind)
    world.join(A, B)

    world.seal()

    assert (world.table.generation, world.table.restarts) == (2, charged)


# --- 4: whether the job goes on


def test_a_spent_budget_ends_the_job_with_the_failure_that_spent_it() -> None:
    world = running(A, terms=replace(TERMS, max_restarts=1, nodes_max=1))
    for _ in range(2):
        world.fail(SIGNAL)
        world.join(A)
        world.seal()

    ended = world.snapshot.ended
    assert ended
    assert (ended.kind, ended.exit_code, ended.reason) == (OutcomeKind.FAILED, 1, "the budget of 1 restart is spent")
    assert (ended.generation, ended.restarts, ended.max_restarts) == (1, 1, 1)
    assert ended.failure
    assert ended.failure.generation == 1


def test_a_job_ends_with_the_exit_code_in_no_restart_codes_and_the_failure_that_has_it() -> None:
    world = running(A, B, terms=replace(TERMS, no_restart_codes=(93,)))
    world.fail(SIGNAL)
    final = Failure(FailureKind.EXIT_CODE, 0, B.node_id, B.host, 1, 0, 1, 93, "exited with code 93", progressed=True)
    world.commit(transactions.fail(world.snapshot, B, final))
    world.join(A, B)

    world.seal()

    ended = world.snapshot.ended
    assert ended
    assert (ended.kind, ended.exit_code, ended.restarts) == (OutcomeKind.FAILED, 93, 0)
    assert ended.failure == final


def test_no_failure_is_judged_before_all_survivors_have_recorded_theirs() -> None:
    world = running(A, B, terms=replace(TERMS, max_restarts=0))
    world.fail(FailureKind.PEER_LOST)
    world.join(A)

    assert world.seal() == ""
    assert not world.ended


def test_a_spent_budget_ends_the_job_though_there_are_too_few_nodes_for_another_table() -> None:
    world = running(A, B, terms=Terms(2, 2, max_restarts=0))
    world.fail(SIGNAL)
    world.lose(B)
    world.join(A)

    world.seal()

    assert world.ended


def test_a_start_up_failure_ends_the_job_only_if_no_generation_ever_progressed() -> None:
    fresh, grown = running(A), running(A)
    grown.fail(SIGNAL, progressed=True)
    grown.run(A)
    for world in (fresh, grown):
        world.fail(FailureKind.STARTUP, progressed=False)
        world.join(A)

        world.seal()

    assert fresh.ended.startswith("it never got past its start")
    assert not grown.ended


def test_that_other_nodes_progressed_is_progress_too() -> None:
    world = running(A, B)
    world.fail(FailureKind.STARTUP, progressed=False)
    world.join(A)
    world.join(B, progressed=True)

    world.seal()

    assert not world.ended
    assert world.table.progressed


def test_an_end_is_not_written_over_a_member_that_joined_after_the_snapshot() -> None:
    world = running(A, terms=replace(TERMS, max_restarts=0))
    world.fail(SIGNAL)
    world.join(A)
    late = world.poll().txn
    world.join(B)

    assert late
    assert not world.commit(late)
    world.seal()
    assert world.ended


@pytest.mark.parametrize("what", ["fail", "loss", "leave"])
def test_with_max_restarts_0_whatever_breaks_the_group_ends_the_job(what: str) -> None:
    world = running(A, B, terms=replace(TERMS, max_restarts=0))
    if what == "fail":
        world.fail(SIGNAL, nodes=(B,))
        world.join(B)
    elif what == "loss":
        world.lose(B)
    else:
        world.leave(B)
    world.seal()
    world.join(A)

    world.seal()

    reasons = {
        "fail": "max_restarts is 0, so any failure ends the job",
        "loss": "host-b was lost: no heartbeat from the elaunch that ran there,"
        " and max_restarts is 0, so that ends the job",
        "leave": "host-b leaves (SIGTERM was received), and max_restarts is 0, so that ends the job",
    }
    assert world.ended == reasons[what]
    assert world.snapshot.ended
    assert world.snapshot.ended.exit_code == 1


@pytest.mark.parametrize(("kind", "is_named"), [(FailureKind.PEER_LOST, False), (SIGNAL, True)])
def test_a_lost_node_that_ends_the_job_is_not_explained_by_the_peers_that_lost_it(
    kind: FailureKind, is_named: bool
) -> None:
    world = running(A, B, terms=replace(TERMS, max_restarts=0))
    world.fail(kind, nodes=(A,))
    world.lose(B)
    world.join(A)

    world.seal()

    assert world.snapshot.ended
    assert world.snapshot.ended.failure is None
    assert bool(world.snapshot.ended.first) is is_named


# --- the budget's window


@pytest.mark.parametrize(
    ("window_s", "age_s", "expected"), [(None, 1000.0, 2), (10.0, 1.0, 2), (10.0, 5.0, 1), (10.0, 10.0, 0)]
)
def test_the_budget_holds_the_restarts_of_its_window_or_all(
    window_s: float | None, age_s: float, expected: int
) -> None:
    table = RankTable(2, (), "a", 1, "", restarts=2, restart_ages_s=(8.0, 0.0))

    assert counted_restarts(replace(TERMS, restart_window_s=window_s), table, age_s) == expected


@pytest.mark.parametrize(("lived_s", "ends"), [(5.0, True), (15.0, False)])
def test_old_restarts_do_not_spend_a_budget_with_a_window(lived_s: float, ends: bool) -> None:
    world = running(A, terms=Terms(max_restarts=1, restart_window_s=10.0))
    world.fail(SIGNAL)
    world.run(A)
    world.poll()
    world.now_s += lived_s
    world.fail(SIGNAL)
    world.join(A)

    world.seal()

    assert bool(world.ended) is ends
    assert world.table.restarts == (1 if ends else 2)


def test_the_window_holds_across_leaders_whose_clocks_have_nothing_in_common() -> None:
    world = running(A, B, terms=Terms(2, 2, max_restarts=2, restart_window_s=60.0))
    world.fail(SIGNAL)
    world.run(A, B)
    world.poll()
    world.now_s += 30
    world.fail(SIGNAL)
    world.run(A, B)
    assert world.table.restart_ages_s == (30.0, 0.0)
    world.lose(A)
    world.now_s = 7.0
    world.elect(B)
    world.poll()
    world.now_s += 40
    world.lead()
    world.join(C, B)
    world.seal()

    assert world.table.restart_ages_s == (40.0,), "the one of 70 s ago is not held against the job any more"
    assert world.table.restarts == 2


# --- 9: generations without progress


def test_generations_in_a_row_without_progress_are_counted_and_end_the_job() -> None:
    world = running(A, terms=Terms(max_restarts=100))
    no_progress = [world.table.barren]

    while not world.ended:
        world.fail(SIGNAL, progressed=False)
        world.join(A)
        world.seal()
        no_progress.append(world.table.barren)

    assert no_progress == [*range(NO_PROGRESS_MAX), NO_PROGRESS_MAX - 1]
    assert world.ended == "10 generations in a row made no progress"


def test_losses_without_progress_end_the_job_too_whatever_the_budget() -> None:
    world = running(A, B, terms=Terms(1, 2, max_restarts=100))

    for turn in range(NO_PROGRESS_MAX):
        world.lose(B)
        world.lead()
        if turn < NO_PROGRESS_MAX - 1:
            world.run(A, B, progressed=False)
        else:
            world.join(A)
            world.seal()

    assert world.ended == (
        "10 generations in a row made no progress; host-b was lost: no heartbeat from the elaunch that ran there"
    )


@pytest.mark.parametrize("who", ["the record of the failure", "a node that joins"])
def test_progress_starts_the_count_of_generations_without_it_again(who: str) -> None:
    world = running(A, terms=Terms(max_restarts=100))
    no_progress = []

    for progressed in (False, False, True, False):
        in_record = progressed and who == "the record of the failure"
        world.fail(SIGNAL, progressed=in_record)
        world.join(A, progressed=progressed and not in_record)
        world.seal()
        no_progress.append(world.table.barren)

    assert no_progress == [1, 2, 0, 1]
    assert world.table.progressed
