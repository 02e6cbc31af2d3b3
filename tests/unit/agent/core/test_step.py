"""agent.core.step: how an agent reacts to the store's responses, and no cell of phase × event is undecided."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from elaunch.agent.core.actions import Clear, Join, Log, SignalWorkers, Spawn
from elaunch.agent.core.events import (
    Cleared,
    Committed,
    Event,
    GroupFailed,
    Leased,
    LeaseLost,
    RestartOrdered,
    Sampled,
    Signalled,
    SnapshotChanged,
    StacksTaken,
    StoreBack,
    StoreFailed,
    StoreLost,
    Tag,
    Tick,
    WorkerEnded,
    WorkerExited,
    WorkerListens,
    WorkerSaved,
    WorkerSaving,
    WorkerStopped,
)
from elaunch.agent.core.membership import _mismatch, _why_seatless
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Joining, Phase, Running, Stopping
from elaunch.agent.core.step import ROWS, TABLE, Ignored, deadline_s, step
from elaunch.agent.diagnosis.hang import Window
from elaunch.agent.diagnosis.stack_groups import Stack
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.snapshot import Snapshot, encode_table, seats_of
from elaunch.rendezvous.store import Delete, Put
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Exclusion, FailureKind, OpenKind, Outcome, OutcomeKind, RankTable
from tests.unit.agent.driver import (
    ALL,
    FAILURE_GRACE_S,
    KEYS,
    SPEC,
    START_S,
    STOP_GRACE_S,
    TERM,
    TWO,
    Driver,
    cleared,
    ends,
    exited,
    failure,
    lost,
    pair,
    settle,
    started,
)
from tests.unit.agent.job_world import A


def test_a_new_agent_starts_a_run_joins_and_starts_its_workers() -> None:
    driver = Driver().begin()

    done = driver.settle()

    assert [type(action) for action in done] == [Join, Spawn]
    spawn = done[-1]
    assert isinstance(spawn, Spawn)
    assert (spawn.table.generation, spawn.group_rank, spawn.table.world_size) == (0, 0, 3)
    assert driver.agent.phase == Running(spawn.table, ALL)


@pytest.mark.parametrize(
    ("slots", "nodes", "run_id", "text"),
    [
        (1, 1, "night", "generation 0: 1 worker (the job starts)"),
        (3, 1, "night", "generation 0: 3 workers (the job starts)"),
        (3, 2, "night", "generation 0: 6 workers on 2 nodes (the job starts; job night)"),
        (3, 2, "none", "generation 0: 6 workers on 2 nodes (the job starts)"),
    ],
)
def test_a_start_is_logged_with_its_size_its_reason_and_the_name_for_other_hosts(
    slots: int, nodes: int, run_id: str, text: str
) -> None:
    spec = replace(SPEC, nodes_min=nodes, nodes_max=nodes, run_id=run_id)
    driver = Driver(spec, slots=slots).begin()
    others = [Driver(spec, store=driver.store, host=f"node-{n}", slots=slots).begin() for n in range(1, nodes)]
    settle(driver, *others)

    starts = [action.text for action in driver.all_acted if isinstance(action, Log)]

    assert starts == [text]


def test_an_agent_that_has_exited_does_nothing_more() -> None:
    driver = Driver().begin()
    driver.happen(Signalled(TERM, "SIGTERM"))
    before = driver.agent

    for event in (
        driver.snapshot_changed,
        exited(0, 0, 1),
        lost(0, workers_too=True),
        cleared(0),
        Tick(),
        StoreLost("gone"),
    ):
        driver.happen(event)
        assert driver.acted == []

    assert driver.agent == before


def test_a_generation_whose_workers_ran_is_not_run_again_while_the_snapshot_is_old(driver: Driver) -> None:
    old = driver.snapshot
    driver.happen(lost(0, workers_too=True))

    done = driver.happen(cleared(0)) + driver.happen(SnapshotChanged(old))
    later = driver.settle()

    assert not [action for action in done if isinstance(action, (Spawn, Join))]
    assert [type(action) for action in later] == [Join, Spawn]
    assert isinstance(later[-1], Spawn)
    assert later[-1].table.generation == 1


@pytest.mark.parametrize(
    ("kind", "level", "grace_s"),
    [
        (OpenKind.FAIL, "warning", FAILURE_GRACE_S),
        (OpenKind.LOSS, "warning", FAILURE_GRACE_S),
        (OpenKind.JOIN, "info", STOP_GRACE_S),
        (OpenKind.LEAVE, "warning", STOP_GRACE_S),
    ],
)
def test_a_generation_that_another_opened_stops_the_workers_soon_or_for_who_comes_or_goes_with_time_to_save(
    driver: Driver, kind: OpenKind, level: str, grace_s: float
) -> None:
    done = driver.sees(1, kind, "rank 9 failed elsewhere")

    assert done == [SignalWorkers(0, ALL, TERM)]
    (logged,) = (action for action in driver.acted if isinstance(action, Log))
    assert logged == Log("stopping: rank 9 failed elsewhere", level)
    assert deadline_s(driver.agent) == START_S + grace_s


@pytest.mark.parametrize(
    ("seats", "nodes_max", "max_restarts", "text"),
    [
        (1, 1, 3, "its 1 seat is taken; waiting as a spare"),
        (3, 3, 0, "its 3 seats are taken; waiting as a spare"),
        (2, 3, 3, "it came too late; waiting for the next"),
        (2, 3, 0, "it came too late; with max_restarts 0 there is no other"),
    ],
)
def test_a_node_without_a_seat_waits_and_logs_it_once(seats: int, nodes_max: int, max_restarts: int, text: str) -> None:
    driver = Driver(replace(SPEC, nodes_max=nodes_max, max_restarts=max_restarts), remote=True).begin()
    driver.answer()
    driver.sync()
    driver.answer()
    driver.sync()
    driver.store.grant(9, 60.0)
    others = seats_of([(f"node-z-{n:08}", 1, "default") for n in range(seats)])
    table = RankTable(0, others, "10.0.0.9", 1, "the job starts")
    driver.write(Put(KEYS.table(0), encode_table(table)), Put(KEYS.leader, "node-z-00000000", 9))
    driver.answer()

    first = driver.sync()
    logged, again = driver.logged, driver.sync()

    assert (first, again, driver.logged) == ([], [], "")
    assert logged == f"generation 0 runs without this node: {text}"
    assert isinstance(driver.agent.phase, Joining)


@pytest.mark.parametrize(
    ("kind", "grace_s"), [(OutcomeKind.INTERRUPTED, STOP_GRACE_S), (OutcomeKind.FAILED, FAILURE_GRACE_S)]
)
def test_an_end_that_was_written_stops_the_workers_and_then_the_agent(kind: OutcomeKind, grace_s: float) -> None:
    driver = started()
    ended = Outcome(kind, "a person cancelled it", 0, 0, 3, signum=2)
    driver.write(Put(KEYS.ended, encode(ended)))

    stopped, logged = driver.sync(), driver.logged
    due_s = deadline_s(driver.agent)
    ends = [driver.exits(rank, -TERM) for rank in range(3)]
    last = driver.happen(cleared(0))

    assert stopped == [SignalWorkers(0, ALL, TERM)]
    assert logged == "stopping: the job has ended: a person cancelled it"
    assert due_s == START_S + grace_s
    assert ends == [[], [], [Clear(0)]]
    assert (last, driver.outcome) == ([], ended)


def test_keys_that_are_gone_stop_the_workers_and_the_outcome_is_unknown(driver: Driver) -> None:
    driver.write(Delete(KEYS.root, f"{KEYS.root}~"))

    stopped = driver.sync()
    ends(driver, -TERM)

    assert stopped == [SignalWorkers(0, ALL, TERM)]
    assert driver.outcome.exit_code == 3
    assert driver.outcome.reason == "the keys of the job job are gone from the store"


def test_a_store_that_is_lost_while_workers_run_stops_them_with_time_to_save(driver: Driver) -> None:
    stopped = driver.happen(StoreLost("the store's history is lost"))
    logged, due_s = driver.logged, deadline_s(driver.agent)
    ends(driver)

    assert stopped == [SignalWorkers(0, ALL, TERM)]
    assert logged == "stopping: the store's history is lost"
    assert due_s == START_S + STOP_GRACE_S
    assert (driver.outcome.kind, driver.outcome.exit_code) == (OutcomeKind.UNKNOWN, 3)


def test_a_store_that_is_lost_while_workers_stop_after_a_failure_leaves_the_outcome_unknown(driver: Driver) -> None:
    driver.exits(1, 3)

    driver.happen(StoreLost("the store's history is lost"))
    ends(driver, -TERM)

    assert driver.outcome.kind is OutcomeKind.UNKNOWN


def test_a_record_that_was_overwritten_stops_no_worker_and_is_logged_once(driver: Driver) -> None:
    before = driver.store.read(KEYS.generation).entries[KEYS.generation].value
    driver.write(Put(KEYS.generation, "scribbled"))

    driver.sync()
    logged = driver.logged
    driver.settle()

    assert driver.logged == ""
    assert driver.store.read(KEYS.generation).entries[KEYS.generation].value == before
    assert logged.startswith(f"{KEYS.generation} in the store is not a Generation: 'scribbled'")
    assert logged.endswith("; continuing without it")
    assert driver.exits(1, 3) == [SignalWorkers(0, frozenset({0, 2}), TERM)]
    assert driver.generation.number == 1


def test_a_node_that_was_finished_already_runs_again_too(driver: Driver) -> None:
    ends(driver)
    assert isinstance(driver.agent.phase, Finished)
    driver.open(1, OpenKind.FAIL)
    driver.write(Put(KEYS.failure(0, "other"), encode(failure(0, 9, 1, host="other"))))

    done = driver.sync()
    logged = driver.logged

    assert logged == "running again: rank 9 failed elsewhere"
    assert [type(action) for action in done + driver.settle()] == [Join, Spawn]


@pytest.mark.parametrize("finished", [False, True])
def test_an_end_that_was_written_ends_an_agent_without_workers(finished: bool) -> None:
    driver = started() if finished else Driver().begin()
    if finished:
        ends(driver)
    else:
        driver.answer()
        driver.sync()
        driver.answer()
    ended = Outcome(OutcomeKind.FAILED, "cancelled", 0, 0, 3)
    driver.write(Put(KEYS.ended, encode(ended)))

    driver.sync()

    assert driver.outcome == ended


def test_the_first_snapshot_with_a_table_begins_its_age(driver: Driver) -> None:
    driver.now_s += 7

    driver.sync()

    assert driver.agent.table_seen == (0, START_S)


def test_nothing_is_decided_before_there_is_a_lease() -> None:
    driver = Driver()

    assert driver.sync() == []
    assert driver.acted == []


def test_the_agent_of_an_excluded_node_logs_why_and_that_it_stays() -> None:
    agent = Agent(A, replace(SPEC, nodes_max=3), Times(), Snapshot(KEYS))
    why = "the last 3 failures were all on host-a, and alike (signal)"
    table = RankTable(3, (), "", 0, "", excluded=(Exclusion("host-a", "signal", why),))

    assert _why_seatless(agent, table) == (
        f"it is excluded (--exclude-after), since {why}; waiting in case too few others are left"
    )
    assert "excluded" not in _why_seatless(agent, replace(table, excluded=()))


def test_a_node_with_another_exclude_after_does_not_fit_the_job() -> None:
    agent = Agent(A, replace(SPEC, exclude_after=3), Times(), Snapshot(KEYS))

    refused = _mismatch(agent, SPEC.terms)

    assert refused
    assert "--exclude-after 0 there, 3 here" in refused.reason
    assert _mismatch(agent, agent.spec.terms) is None


def test_a_node_with_other_no_restart_codes_does_not_fit_the_job() -> None:
    agent = Agent(A, replace(SPEC, no_restart_codes=(93, 94)), Times(), Snapshot(KEYS))

    refused = _mismatch(agent, SPEC.terms)

    assert refused
    assert "--no-restart-codes none there, 93,94 here" in refused.reason


PHASES: tuple[type[Phase], ...] = get_args(Phase)
EVENTS: tuple[type[Event], ...] = get_args(Event)


def second_of_two(phase: type[Phase]) -> Driver:
    """A node of a job of two, in that phase."""
    _, driver = pair(TWO)
    if phase is Joining:
        driver.happen(lost(0, workers_too=True))
        driver.happen(cleared(0))
    if phase is Finished:
        ends(driver)
    if phase is Stopping:
        driver.exits(1, 1)
    if phase is Clearing:
        driver.happen(lost(0, workers_too=True))
    if phase is Exited:
        driver.exits(1, 1, FailureKind.EXCEPTION)
        driver.happen(Signalled(TERM, "SIGTERM"))
        driver.happen(lost(0, workers_too=True))
        driver.happen(cleared(0))
    assert isinstance(driver.agent.phase, phase)
    return driver


def event_of(kind: type[Event], driver: Driver) -> Event:
    """An event of that kind, about the generation that the node runs."""
    events: tuple[Event, ...] = (
        driver.snapshot_changed,
        Committed(Tag.LEAD, True, driver.store.read(KEYS.root).revision),
        Leased(17, "node-b-00000017"),
        LeaseLost(driver.agent.membership.lease),
        StoreFailed("it does not answer"),
        StoreBack(),
        StoreLost("it is another cluster"),
        exited(0, 0, 1),
        WorkerEnded(0, 0, raised=True),
        WorkerListens(0, 0, to_stop=True, to_failure=True),
        WorkerSaving(0, 0, 7),
        WorkerSaved(0, 0, 7),
        WorkerStopped(0, 0, 7),
        Sampled(0, {0: Window(5.0, 0.0, 0.0, 0.0, 0, "S")}),
        StacksTaken(0, (Stack(0, 4711, trouble="it is gone"),)),
        lost(0, workers_too=True),
        cleared(0),
        Signalled(TERM, "SIGTERM"),
        RestartOrdered(),
        Tick(),
    )
    (event,) = (event for event in events if isinstance(event, kind))
    return event


def test_each_event_has_one_row_and_each_phase_one_column() -> None:
    rows = Counter(row.event for row in ROWS)

    assert rows == Counter(EVENTS)
    assert {*TABLE} == {*PHASES} - {Exited}
    assert all({*column} == {*EVENTS} for column in TABLE.values())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("event", EVENTS)
def test_each_cell_decides_and_an_ignored_event_changes_nothing(phase: type[Phase], event: type[Event]) -> None:
    driver = second_of_two(phase)
    before = driver.agent

    agent, actions = step(before, event_of(event, driver), driver.now_s)

    assert isinstance(agent, Agent)
    if phase is Exited or (isinstance(TABLE[phase][event], Ignored) and event is not SnapshotChanged):
        assert (agent, actions) == (before, ())


@pytest.mark.parametrize("phase", [Running, Stopping, Clearing])
@pytest.mark.parametrize("event", [WorkerExited, GroupFailed, Cleared, WorkerListens])
def test_an_event_of_another_generation_changes_nothing(phase: type[Phase], event: type[Event]) -> None:
    driver = second_of_two(phase)
    assert isinstance(driver.agent.phase, (Running, Stopping, Clearing))
    driver.open(1)
    old = event_of(event, driver)
    newer: Event = {
        WorkerExited: exited(1, 0, 1),
        GroupFailed: lost(1, workers_too=True),
        Cleared: cleared(1),
        WorkerListens: WorkerListens(1, 0, to_stop=True, to_failure=True),
    }[event]

    assert type(newer) is type(old)
    assert step(driver.agent, newer, driver.now_s) == (driver.agent, ())
