"""agent.core.step: no cell of phase × event is undecided, and the page that shows them is up to date."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from elaunch.agent.core.events import (
    Cleared,
    Committed,
    Event,
    Leased,
    LeaseLost,
    RestartOrdered,
    Sampled,
    ServiceLost,
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
    WorkersHung,
    WorkerStopped,
)
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Joining, Phase, Running, Stopping
from elaunch.agent.core.step import ROWS, TABLE, Ignored, step
from elaunch.agent.diagnosis.hang import Window
from elaunch.agent.diagnosis.stack_groups import Stack
from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.driver import KEYS, TERM, TWO, Driver, cleared, exited, failure, lost, pair

PHASES: tuple[type[Phase], ...] = get_args(Phase)
EVENTS: tuple[type[Event], ...] = get_args(Event)
# The longest text that a reader can take in at a glance.


def second_of_two(phase: type[Phase]) -> Driver:
    """A node of a job of two, in that phase."""
    _, driver = pair(TWO)
    if phase is Joining:
        driver.happen(lost(0, workers_too=True))
        driver.happen(cleared(0))
    if phase is Finished:
        driver.exits(0, 0)
        driver.exits(1, 0)
        driver.exits(2, 0)
        driver.happen(cleared(0))
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
        WorkersHung(0, failure(0, 0, None, FailureKind.HANG)),
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
    assert [*TABLE] == [*PHASES]
    assert all({*column} == {*EVENTS} for column in TABLE.values())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("event", EVENTS)
def test_each_cell_decides_and_an_ignored_event_changes_nothing(phase: type[Phase], event: type[Event]) -> None:
    driver = second_of_two(phase)
    before = driver.agent

    agent, actions = step(before, event_of(event, driver), driver.now_s)

    assert isinstance(agent, Agent)
    if isinstance(TABLE[phase][event], Ignored) and event is not SnapshotChanged:
        assert (agent, actions) == (before, ())


@pytest.mark.parametrize("phase", [Running, Stopping, Clearing])
@pytest.mark.parametrize("event", [WorkerExited, ServiceLost, Cleared, WorkerListens, WorkersHung])
def test_an_event_of_another_generation_changes_nothing(phase: type[Phase], event: type[Event]) -> None:
    driver = second_of_two(phase)
    assert isinstance(driver.agent.phase, (Running, Stopping, Clearing))
    driver.open(1)
    old = event_of(event, driver)
    newer: Event = {
        WorkerExited: exited(1, 0, 1),
        ServiceLost: lost(1, workers_too=True),
        Cleared: cleared(1),
        WorkerListens: WorkerListens(1, 0, to_stop=True, to_failure=True),
        WorkersHung: WorkersHung(1, failure(1, 0, None, FailureKind.HANG)),
    }[event]

    assert type(newer) is type(old)
    assert step(driver.agent, newer, driver.now_s) == (driver.agent, ())
