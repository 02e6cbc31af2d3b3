"""agent.core.running: how an agent reacts to events of its workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Action, Clear, Commit, Log, SignalWorkers
from elaunch.agent.core.events import Cleared, Tick, WorkerEnded, WorkerExited, WorkerListens
from elaunch.agent.core.running import EXIT_S, HOLD_S
from elaunch.agent.core.state import Running
from elaunch.agent.core.step import deadline_s
from elaunch.rendezvous.rules.snapshot import encode_table, seats_of
from elaunch.rendezvous.store import Put
from elaunch.rendezvous.types import FailureKind, JobSpec, OpenKind, OutcomeKind, RankTable
from tests.unit.agent.driver import (
    ALL,
    FAILURE_GRACE_S,
    KEYS,
    KILL,
    SPEC,
    START_S,
    STOP_GRACE_S,
    TERM,
    Driver,
    cleared,
    ended,
    ends,
    exited,
    failure,
    lost,
    started,
)

ABRT = 6


def settle_with_exit_of_rank_1(driver: Driver) -> None:
    """Rank 1 exits with code 7, and rank 2 by our SIGTERM; the job ends."""
    driver.exits(1, 7)
    driver.exits(2, -TERM, FailureKind.SIGNAL)
    driver.clear()


def test_a_failed_worker_stops_its_siblings_and_opens_the_next_generation(driver: Driver) -> None:
    done = driver.exits(1, 3)

    assert done == [SignalWorkers(0, frozenset({0, 2}), TERM)]
    snapshot, generation = driver.snapshot, driver.generation
    assert (generation.number, generation.kind) == (1, OpenKind.FAIL)
    assert [f.local_rank for f in snapshot.failures[0]] == [1]
    assert "stopping 2 others" in driver.logged
    assert [action.level for action in driver.acted if isinstance(action, Log)] == ["error"]
    assert isinstance(driver.acted[0], Commit), "the others are notified before anything is stopped"


def test_a_worker_that_exited_with_0_before_its_peers_is_what_they_lost() -> None:
    driver = started(replace(SPEC, max_restarts=0))
    driver.exits(1, 0)

    driver.exits(0, 1, FailureKind.PEER_LOST)
    logged = driver.logged
    driver.exits(2, 1, FailureKind.PEER_LOST)
    driver.clear()

    assert "rank 1 (local rank 1 on node-a, pid 101) ended with exit code 0" in logged
    assert "while rank 0 waited for it, in generation 0; stopping 1 other" in logged
    assert (driver.failed.rank, driver.failed.kind) == (1, FailureKind.ENDED_EARLY)
    assert "ranks 0 and 2 waited" in driver.failed.message
    assert driver.failed.ranks_alike == 1, "its end is known twice"


RETURNED = replace(ended(0, 1), code=None, message="reached the end of its program, but did not exit in time")


@pytest.mark.parametrize("kind", [FailureKind.PEER_LOST, FailureKind.EXIT_CODE], ids=["raised", "caught"])
@pytest.mark.parametrize(("code", "message"), [(7, "exited with code 7"), (0, "ended with exit code 0 at 12:00:00")])
def test_no_worker_is_stopped_before_the_rank_on_its_way_out_has_its_exit_status(
    code: int, message: str, kind: FailureKind
) -> None:
    driver = started(replace(SPEC, max_restarts=0))
    driver.happen(WorkerEnded(0, 1))
    held = driver.exits(0, 1, kind)
    driver.now_s += EXIT_S / 2
    held += driver.happen(Tick())

    stopped = driver.exits(1, code)
    logged = driver.logged
    driver.exits(2, 1, FailureKind.PEER_LOST)
    driver.clear()

    assert held == []
    assert SignalWorkers(0, frozenset({2}), TERM) in stopped
    assert logged.startswith(f"rank 1 (local rank 1 on node-a, pid 101) {message}") is (code == 7 or kind.is_secondary)
    failed = (1, code) if code or kind.is_secondary else (0, 1)
    assert (driver.failed.rank, driver.failed.code) == failed
    if kind.is_secondary:
        assert "while ranks 0 and 2 waited for it," in driver.failed.message


def test_the_rank_that_left_its_group_first_is_the_cause_however_late_that_is_read() -> None:
    driver = started(replace(SPEC, max_restarts=0))
    driver.happen(WorkerEnded(0, 0, over_s=7.5))
    driver.happen(WorkerEnded(0, 1, over_s=7.4))

    held = driver.exits(0, 1)
    settle_with_exit_of_rank_1(driver)

    assert held == []
    assert (driver.failed.rank, driver.failed.code) == (1, 7)


def test_a_process_that_lingers_after_its_program_delays_no_restart(driver: Driver) -> None:
    driver.happen(WorkerEnded(0, 1))
    driver.now_s += 60.0

    stopped = driver.exits(0, -KILL, FailureKind.SIGNAL)

    assert SignalWorkers(0, frozenset({1, 2}), TERM) in stopped


def test_a_rank_of_another_node_lost_a_peer_that_is_on_its_way_out_here(driver: Driver) -> None:
    driver.happen(WorkerEnded(0, 1))

    stopped = driver.sees(1, OpenKind.FAIL, "rank 9 lost a peer")
    due_s = deadline_s(driver.agent)
    driver.exits(1, 7)
    ends(driver, -TERM, FailureKind.SIGNAL)

    assert SignalWorkers(0, frozenset({0, 2}), TERM) in stopped
    assert due_s == START_S + EXIT_S
    (record,) = driver.snapshot.failures[0]
    assert (record.rank, record.code) == (1, 7)


def test_an_abort_after_another_programs_end_is_an_effect_and_without_one_it_is_a_failure() -> None:
    driver, alone = started(replace(SPEC, max_restarts=0)), started()
    driver.happen(WorkerEnded(0, 1))

    # As NCCL's watchdog ends a survivor.
    held = driver.exits(0, -ABRT, FailureKind.SIGNAL)
    settle_with_exit_of_rank_1(driver)

    assert held == []
    assert (driver.failed.rank, driver.failed.code) == (1, 7)
    assert SignalWorkers(0, frozenset({1, 2}), TERM) in alone.exits(0, -ABRT, FailureKind.SIGNAL)


def test_what_is_not_explained_waits_for_the_next_exit_and_not_for_long() -> None:
    explained, unexplained = started(), started()

    held = explained.exits(0, 1, FailureKind.PEER_LOST)
    explained.exits(1, 9)

    assert held == []
    assert explained.logged.startswith("rank 1 (local rank 1 on node-a, pid 101) exited with code 9")
    assert SignalWorkers(0, frozenset({1, 2}), TERM) in unexplained.loses_peer(0)


def test_a_rank_that_raised_before_its_peer_lost_it_is_awaited_and_named() -> None:
    driver = started(replace(SPEC, max_restarts=0))
    driver.happen(WorkerEnded(0, 1, over_s=7.0, raised=True))
    driver.happen(WorkerEnded(0, 0, over_s=7.1, raised=True))

    held = driver.exits(0, 1, FailureKind.PEER_LOST)
    driver.exits(1, 1, FailureKind.EXCEPTION)

    assert held == []
    assert driver.logged.startswith("rank 1 (local rank 1 on node-a, pid 101) ")
    assert driver.logged.endswith("; stopping 1 other")


@pytest.mark.parametrize("live", [0, 1, 3], ids=["finished", "one runs", "none has ended"])
def test_a_node_reports_which_of_its_workers_had_ended_when_a_rank_of_another_node_failed(live: int) -> None:
    driver = started()
    for rank in range(3 - live):
        driver.exits(rank, 0)
    if not live:
        driver.happen(cleared(0))

    driver.sees(1, OpenKind.FAIL, "rank 9 lost a peer")
    for rank in range(3 - live, 3):
        driver.exits(rank, -TERM, FailureKind.SIGNAL)
    if live:
        driver.happen(cleared(0))
    driver.settle()

    notified = driver.snapshot.failures.get(0, ())
    assert [(f.kind, f.rank) for f in notified] == ([] if live == 3 else [(FailureKind.ENDED_EARLY, 0)])


@pytest.mark.parametrize(
    ("workers_too", "done", "kind"),
    [
        (False, SignalWorkers(0, ALL, TERM), FailureKind.STORE_LOST),
        (True, Clear(0), FailureKind.TEMPLATE_LOST),
    ],
)
def test_the_loss_of_the_worker_store_or_of_the_fork_server_is_a_failure(
    driver: Driver, workers_too: bool, done: Action, kind: FailureKind
) -> None:
    assert driver.happen(lost(0, workers_too=workers_too)) == [done]
    assert [f.kind for f in driver.snapshot.failures[0]] == [kind]


def test_a_worker_that_died_of_sigterm_alone_is_a_failure_after_a_moment(driver: Driver) -> None:
    driver.exits(0, -TERM)

    early = driver.after(HOLD_S / 2)
    done = driver.after(HOLD_S / 2)

    assert early == []
    assert done == [SignalWorkers(0, frozenset({1, 2}), TERM)]
    assert [f.code for f in driver.snapshot.failures[0]] == [-TERM]


def test_the_held_death_stays_the_first_failure_when_another_worker_fails_too(driver: Driver) -> None:
    driver.exits(0, -TERM)

    done = driver.exits(1, 7)

    assert done == [SignalWorkers(0, frozenset({2}), TERM)]
    assert [f.code for f in driver.snapshot.failures[0]] == [-TERM]


def test_a_worker_that_raised_and_does_not_end_is_killed_after_the_stop_grace(driver: Driver) -> None:
    driver.happen(WorkerEnded(0, 1, raised=True))
    early = driver.after(STOP_GRACE_S - 0.001)

    late = driver.after(0.001)

    assert early == []
    assert late == [SignalWorkers(0, frozenset({1}), KILL)]
    assert driver.logged == "local rank 1 raised an exception and did not exit within 30 s; SIGKILL"
    assert driver.happen(Tick()) == []


def test_a_worker_that_raised_and_ends_by_itself_is_left_alone(driver: Driver) -> None:
    driver.happen(WorkerEnded(0, 1, raised=True))
    assert deadline_s(driver.agent) == driver.now_s + STOP_GRACE_S

    driver.happen(exited(0, 1, 0))

    assert deadline_s(driver.agent) is None
    driver.now_s += 10 * STOP_GRACE_S
    assert driver.happen(Tick()) == []


@pytest.mark.parametrize("kind", [OpenKind.FAIL, OpenKind.LOSS])
def test_a_failure_of_its_own_that_another_node_reported_first_is_recorded_and_opens_nothing(kind: OpenKind) -> None:
    driver = started()
    driver.sees(1, kind)
    due_s = deadline_s(driver.agent)
    driver.now_s += 1

    driver.exits(0, 1, FailureKind.EXCEPTION)

    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.EXCEPTION]
    assert driver.generation.number == 1
    assert deadline_s(driver.agent) == due_s
    assert driver.logged == driver.snapshot.failures[0][0].sentence


def newcomer(spec: JobSpec = SPEC, *, progressed: bool = True) -> Driver:
    """A node that comes to a job whose earlier generations did, or did not, get past their start."""
    driver = Driver(spec).begin()
    for _ in range(2):
        driver.answer()
        driver.sync()
    driver.answer()
    leader = "node-z-00000000"
    seats = seats_of([(node_id, 3, "default") for node_id in (leader, driver.node_id)])
    table = RankTable(0, seats, "10.0.0.9", 1, "node-a joins", restarts=1, progressed=progressed)
    driver.store.grant(9, 60.0)
    driver.write(Put(KEYS.leader, leader, 9), Put(KEYS.table(0), encode_table(table)))
    driver.settle()
    assert isinstance(driver.agent.phase, Running)
    return driver


def test_a_newcomer_whose_workers_cannot_even_start_leaves_a_healthy_job_alone() -> None:
    driver = newcomer()

    done = driver.exits(1, 2, FailureKind.STARTUP)
    driver.all_exit(-TERM)
    last = driver.happen(Cleared(0, {0: "other", 1: "its last line"}))

    assert done == [SignalWorkers(0, frozenset({0, 2}), TERM)]
    snapshot, generation = driver.snapshot, driver.generation
    assert (generation.number, generation.kind) == (1, OpenKind.LEAVE)
    assert not snapshot.failures
    assert driver.node_id not in snapshot.members
    assert last == []
    assert (driver.outcome.kind, driver.outcome.exit_code) == (OutcomeKind.FAILED, 1)
    assert (driver.failed.local_rank, driver.failed.tail) == (1, "its last line")
    assert "they continue without it" in driver.outcome.reason


@pytest.mark.parametrize(
    ("progressed", "kind", "codes"),
    [(True, FailureKind.EXIT_CODE, ()), (False, FailureKind.STARTUP, ()), (True, FailureKind.STARTUP, (2,))],
)
def test_any_other_failure_of_a_newcomer_or_one_that_wants_no_restart_is_one_like_any_other(
    progressed: bool, kind: FailureKind, codes: tuple[int, ...]
) -> None:
    driver = newcomer(replace(SPEC, no_restart_codes=codes), progressed=progressed)

    driver.exits(1, 2, kind)

    assert [(f.kind, f.code) for f in driver.snapshot.failures[0]] == [(kind, 2)]
    assert driver.node_id in driver.snapshot.members


def test_of_a_nodes_failures_the_one_that_wants_no_restart_is_recorded() -> None:
    driver = started(replace(SPEC, no_restart_codes=(93,)))
    driver.happen(WorkerListens(0, 1, to_stop=True, to_failure=True))

    driver.exits(0, 1)
    driver.exits(1, 93)
    driver.exits(2, -TERM, FailureKind.SIGNAL)
    driver.happen(cleared(0))

    assert [f.code for f in driver.snapshot.failures[0]] == [93]


def test_a_start_up_failure_of_a_node_that_ran_before_is_one_like_any_other(driver: Driver) -> None:
    driver.exits(0, 3)
    ends(driver, -TERM)
    driver.settle()
    assert isinstance(driver.agent.phase, Running)
    assert driver.agent.phase.table.progressed

    driver.exits(1, 2, FailureKind.STARTUP)

    assert [f.kind for f in driver.snapshot.failures[1]] == [FailureKind.STARTUP]


def test_an_exit_code_that_our_own_signal_made_is_no_cause() -> None:
    driver = started(replace(SPEC, max_restarts=0))
    driver.loses_peer(0)
    # A handler of SIGTERM ends it.
    driver.exits(1, 3)
    driver.exits(2, -TERM, FailureKind.SIGNAL)
    driver.clear()

    assert (driver.failed.rank, driver.failed.kind) == (0, FailureKind.PEER_LOST)


@pytest.mark.parametrize("code", [7, -KILL])
def test_a_rank_whose_exit_takes_too_long_is_not_signalled_before_the_stop_ends(code: int) -> None:
    driver = started(replace(SPEC, max_restarts=0))
    driver.happen(WorkerEnded(0, 1))
    driver.exits(0, 1, FailureKind.PEER_LOST)

    signalled = driver.after(EXIT_S)
    driver.exits(2, -TERM, FailureKind.SIGNAL)
    killed = driver.after(max(FAILURE_GRACE_S, EXIT_S))
    record = failure(0, 1, code, FailureKind.EXIT_CODE if code > 0 else FailureKind.SIGNAL)
    driver.happen(WorkerExited(0, 1, code, record, None if code > 0 else RETURNED))
    driver.clear()

    assert SignalWorkers(0, frozenset({2}), TERM) in signalled
    assert SignalWorkers(0, frozenset({1}), KILL) in killed
    assert driver.failed.rank == 1
    assert driver.failed.code == (code if code > 0 else None), "what our own signal made is no cause"


def test_an_exit_with_0_does_not_end_the_wait_for_a_rank_on_its_way_out() -> None:
    driver = started(replace(SPEC, max_restarts=0))
    driver.happen(WorkerEnded(0, 1))
    driver.exits(0, 1, FailureKind.PEER_LOST)
    driver.happen(WorkerEnded(0, 2))

    stopped = driver.exits(2, 0)
    driver.exits(1, 7)
    driver.clear()

    assert stopped == []
    assert (driver.failed.rank, driver.failed.code) == (1, 7)


def test_other_workers_deaths_do_not_put_off_the_moment(driver: Driver) -> None:
    driver.exits(0, -TERM)

    driver.now_s += HOLD_S / 2
    driver.exits(1, -TERM)

    assert deadline_s(driver.agent) == START_S + HOLD_S


def test_a_held_death_is_not_forgotten_when_all_others_end_well(driver: Driver) -> None:
    driver.exits(0, -TERM)
    driver.exits(1, 0)
    driver.exits(2, 0)

    done = driver.after(HOLD_S)

    assert done == [Clear(0)]
    assert [f.code for f in driver.snapshot.failures[0]] == [-TERM]
