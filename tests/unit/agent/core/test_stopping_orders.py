"""agent.core.stopping: workers that listen on their links are notified there, and what they report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import (
    Action,
    Clear,
    NotifyWorkers,
    PeerFailed,
    SignalWorkers,
    StopAtStepBoundary,
    StopReason,
)
from elaunch.agent.core.events import Signalled, Tick, WorkerListens, WorkerSaved, WorkerSaving, WorkerStopped
from elaunch.agent.core.running import STOPPED_HOLD_S
from elaunch.agent.core.state import Finished, Joining, Running, Stopping
from elaunch.agent.core.step import deadline_s
from elaunch.rendezvous.types import FailureKind, OpenKind
from tests.unit.agent.driver import (
    ALL,
    FAILURE_GRACE_S,
    INT,
    KILL,
    START_S,
    STOP_GRACE_S,
    TERM,
    TIMES,
    Driver,
    cleared,
    started,
)

BOUNDARY_WAIT_S = TIMES.boundary_wait_s
JOIN, LEAVE, INTERRUPT = (StopAtStepBoundary(reason) for reason in StopReason)


def listening(driver: Driver, *ranks: int, to_failure: bool = True) -> Driver:
    """Workers (all, if none is named) report that they listen."""
    assert isinstance(driver.agent.phase, Running)
    for rank in ranks or sorted(driver.agent.phase.live):
        driver.happen(WorkerListens(driver.agent.phase.table.generation, rank, to_stop=True, to_failure=to_failure))
    return driver


@pytest.fixture
def driver() -> Driver:
    """A single node whose workers run, and all listen."""
    return listening(started())


def notify(message: object, *ranks: int) -> NotifyWorkers:
    return NotifyWorkers(0, frozenset(ranks), message)  # type: ignore[arg-type]


def signal(signum: int, *ranks: int) -> SignalWorkers:
    return SignalWorkers(0, frozenset(ranks), signum)


def reports_stopped(driver: Driver, *ranks: int, step: int = 7) -> list[Action]:
    return [action for rank in ranks for action in driver.happen(WorkerStopped(0, rank, step))]


def reports_saved(driver: Driver, rank: int) -> list[Action]:
    return driver.happen(WorkerSaved(0, rank, 7))


# --- a failure of the group


def test_who_saves_is_notified_of_a_failure_and_gets_no_signal() -> None:
    driver = listening(started(), 0)

    done = driver.exits(1, 3)

    assert done == [notify(PeerFailed(0), 0), signal(TERM, 2)]


def test_it_is_killed_as_soon_as_it_has_saved_and_that_is_no_failure(driver: Driver) -> None:
    driver.exits(1, 3)

    killed = [reports_saved(driver, 2), reports_saved(driver, 2), reports_saved(driver, 0)]
    last = [driver.exits(2, -KILL, FailureKind.SIGNAL), driver.exits(0, -KILL, FailureKind.SIGNAL)]
    driver.happen(cleared(0))

    assert killed == [[signal(KILL, 2)], [], [signal(KILL, 0)]]
    assert last == [[], [Clear(0)]]
    assert [f.local_rank for f in driver.snapshot.failures[0]] == [1]
    assert [f.code for f in driver.snapshot.failures[0]] == [3]


def test_who_listens_for_stops_only_gets_sigterm_after_a_failure() -> None:
    driver = listening(started(), to_failure=False)

    done = driver.exits(1, 3)

    assert done == [signal(TERM, 0, 2)]
    assert reports_saved(driver, 0) == []


def test_that_a_worker_saved_kills_no_worker_while_nothing_has_failed(driver: Driver) -> None:
    before = reports_saved(driver, 0)
    driver.happen(Signalled(TERM, "SIGTERM"))
    leaving = reports_saved(driver, 0)

    assert (before, leaving) == ([], [])


# --- saving takes longer than the failure grace


def test_who_saves_has_until_the_stop_grace_and_the_others_no_longer_than_before() -> None:
    driver = listening(started(), 0, 1)
    driver.exits(2, 3)
    driver.happen(WorkerSaving(0, 0, 7))

    first, logged = driver.after(FAILURE_GRACE_S), driver.logged
    due_s = deadline_s(driver.agent)
    driver.exits(1, -KILL, FailureKind.SIGNAL)
    driver.now_s = START_S + STOP_GRACE_S - 0.01
    early = driver.happen(Tick())

    assert first == [signal(KILL, 1)]
    assert logged == "local rank 1 still ran after 2 s; SIGKILL"
    assert due_s == START_S + STOP_GRACE_S
    assert early == []
    assert reports_saved(driver, 0) == [signal(KILL, 0)]
    assert [f.local_rank for f in driver.snapshot.failures[0]] == [2]


def test_who_is_not_done_with_saving_then_is_killed_and_that_is_logged(driver: Driver) -> None:
    driver.exits(1, 3)
    for rank in (0, 2):
        driver.happen(WorkerSaving(0, rank, 7))

    spared = driver.after(FAILURE_GRACE_S)
    driver.now_s = START_S + STOP_GRACE_S
    killed = driver.happen(Tick())

    assert spared == []
    assert killed == [signal(KILL, 0, 2)]
    assert driver.logged == "local rank 0, 2 had not finished saving 30 s after the failure; SIGKILL"


# --- who listens no more


def test_who_listens_no_more_after_a_notice_to_stop_gets_sigterm(driver: Driver) -> None:
    driver.happen(Signalled(TERM, "SIGTERM"))
    reports_stopped(driver, 2)

    text = [driver.happen(WorkerListens(0, rank, to_stop=False, to_failure=True)) for rank in (1, 1, 2)]

    assert text == [[signal(TERM, 1)], [], []], "once, and none to who has stopped"


def test_who_listens_no_more_after_a_notice_of_a_failure_gets_sigterm(driver: Driver) -> None:
    driver.exits(1, 3)

    done = driver.happen(WorkerListens(0, 0, to_stop=True, to_failure=False))

    assert done == [signal(TERM, 0)]
    assert reports_saved(driver, 0) == []


# --- nodes that come and go


@pytest.mark.parametrize(("kind", "message"), [(OpenKind.JOIN, JOIN), (OpenKind.LEAVE, LEAVE)])
def test_for_nodes_that_come_and_go_who_listens_is_notified_to_stop_after_a_step(
    kind: OpenKind, message: StopAtStepBoundary
) -> None:
    driver = listening(started(), 0, 2)
    done = driver.sees(1, kind, "node-b joins")

    assert done == [notify(message, 0, 2), signal(TERM, 1)]
    assert driver.sync() == []


def test_who_comes_to_no_step_boundary_in_time_gets_sigterm_and_then_the_stop_grace(driver: Driver) -> None:
    driver.sees(1, OpenKind.JOIN, "node-b joins")
    reports_stopped(driver, 1)

    first_s = deadline_s(driver.agent)
    driver.now_s = START_S + BOUNDARY_WAIT_S - 0.01
    early = driver.happen(Tick())
    driver.now_s = START_S + BOUNDARY_WAIT_S
    late, logged = driver.happen(Tick()), driver.logged
    second_s = deadline_s(driver.agent)
    last = driver.after(STOP_GRACE_S)

    assert first_s == START_S + BOUNDARY_WAIT_S
    assert early == []
    assert late == [signal(TERM, 0, 2)]
    assert logged == "local rank 0, 2 reached no step boundary within 10 s; SIGTERM"
    assert second_s == START_S + BOUNDARY_WAIT_S + STOP_GRACE_S
    assert last == [signal(KILL, 0, 1, 2)]


def test_a_failure_elsewhere_while_they_come_to_the_boundary_is_reported_to_those_that_have_not_come() -> None:
    driver = listening(started())
    driver.sees(1, OpenKind.JOIN, "node-b joins")
    reports_stopped(driver, 1)
    driver.now_s += 1
    done = driver.sees(2, OpenKind.LOSS, "node-c was lost")

    assert done == [notify(PeerFailed(0), 0, 2)]
    assert deadline_s(driver.agent) == START_S + 1 + FAILURE_GRACE_S
    assert driver.sync() == []
    assert reports_saved(driver, 0) == [signal(KILL, 0)]
    assert reports_saved(driver, 1) == [], "it is on its way out"


def test_a_failure_of_its_own_while_they_come_to_the_boundary_is_reported_to_the_others(driver: Driver) -> None:
    driver.sees(1, OpenKind.JOIN, "node-b joins")

    done = driver.exits(0, 1, FailureKind.EXCEPTION)

    assert done == [notify(PeerFailed(0), 1, 2)]
    assert deadline_s(driver.agent) == START_S + FAILURE_GRACE_S
    assert (driver.generation.number, driver.generation.kind) == (2, OpenKind.FAIL)
    assert [f.local_rank for f in driver.snapshot.failures[0]] == [0]


def test_a_bare_exit_code_while_they_come_to_the_boundary_may_be_an_effect(driver: Driver) -> None:
    driver.sees(1, OpenKind.JOIN, "node-b joins")

    driver.exits(0, 7)

    assert not driver.snapshot.failures


# --- all ranks stop after the same step, also on a node whose agent does not know why


@pytest.mark.parametrize("code", [0, 128 + TERM, 128 + INT])
def test_a_worker_that_stopped_before_its_agent_knows_why_is_held(driver: Driver, code: int) -> None:
    reports_stopped(driver, *ALL)

    ends = [driver.exits(rank, code) for rank in ALL]
    due_s = deadline_s(driver.agent)
    early = driver.after(STOPPED_HOLD_S - 0.01)
    seen = driver.sees(1, OpenKind.JOIN, "node-b joins")
    driver.happen(cleared(0))

    assert ends == [[], [], []]
    assert due_s == START_S + STOPPED_HOLD_S
    assert early == []
    assert seen == [Clear(0)]
    assert not driver.snapshot.failures
    assert not driver.snapshot.done
    assert isinstance(driver.agent.phase, Joining)


def test_where_no_order_follows_an_exit_with_0_is_what_it_is(driver: Driver) -> None:
    reports_stopped(driver, *ALL)
    driver.all_exit()

    done = driver.after(STOPPED_HOLD_S)
    driver.happen(cleared(0))

    assert done == [Clear(0, is_done=True)]
    assert isinstance(driver.agent.phase, Finished)


@pytest.mark.parametrize("code", [1, -KILL])
def test_a_worker_that_fails_after_it_had_stopped_is_a_failure_at_once(driver: Driver, code: int) -> None:
    reports_stopped(driver, 0, 1)
    driver.exits(1, 128 + TERM)

    driver.exits(0, code)

    assert [f.local_rank for f in driver.snapshot.failures[0]] == [0]


# --- signals to the agent


@pytest.mark.parametrize(
    ("signum", "message"),
    [(TERM, LEAVE), (1, LEAVE), (10, LEAVE), (INT, INTERRUPT)],
    ids=["TERM", "HUP", "USR1", "INT"],
)
def test_a_signal_is_passed_on_to_those_only_that_do_not_listen(signum: int, message: StopAtStepBoundary) -> None:
    driver = listening(started(), 0, 1)

    done = driver.happen(Signalled(signum, "SIGX"))

    assert done == [notify(message, 0, 1), signal(signum, 2)]
    assert deadline_s(driver.agent) == START_S + STOP_GRACE_S


@pytest.mark.parametrize("signum", [10, 12])
def test_a_notice_that_another_node_had_first_is_passed_on_once(signum: int) -> None:
    driver = listening(started(), 0)
    notified = driver.sees(1, OpenKind.LEAVE, "node-b leaves", signum)
    own = driver.happen(Signalled(signum, "SIGX"))

    assert notified == [notify(LEAVE, 0), signal(signum, 1, 2)]
    assert own == [notify(LEAVE, 0)], "they have it already"


def test_any_other_signal_by_which_a_node_leaves_is_its_own() -> None:
    driver = started()
    driver.open(1, OpenKind.LEAVE, "node-b leaves", 1)

    assert driver.sync() == [signal(TERM, *ALL)]


@pytest.mark.parametrize("code", [-10, 128 + 10, -TERM])
def test_who_ends_of_the_notice_has_not_failed(code: int) -> None:
    driver = started()
    driver.sees(1, OpenKind.LEAVE, "node-b leaves", 10)

    driver.exits(0, code, FailureKind.SIGNAL)

    assert not driver.snapshot.failures
    assert isinstance(driver.agent.phase, Stopping)
    assert driver.agent.phase.live == {1, 2}


def test_a_signal_while_they_stop_for_a_join_is_passed_on_too_and_leaves_no_more_than_the_stop_grace() -> None:
    driver = listening(started(), 0, 1)
    driver.sees(1, OpenKind.JOIN, "node-b joins")
    driver.now_s += 1

    done = driver.happen(Signalled(TERM, "SIGTERM"))

    assert done == [notify(LEAVE, 0, 1), signal(TERM, 2)]
    assert deadline_s(driver.agent) == START_S + 1 + STOP_GRACE_S


def test_a_worker_that_fails_after_a_signal_lets_no_worker_wait_for_the_end_of_its_step(driver: Driver) -> None:
    driver.happen(Signalled(TERM, "SIGTERM"))

    done = driver.exits(0, -KILL, FailureKind.SIGNAL)

    assert done == [notify(PeerFailed(0), 1, 2)]
    assert not driver.snapshot.failures
    assert reports_saved(driver, 1) == [signal(KILL, 1)]


def test_workers_that_listen_have_two_seconds_after_a_failure_also_where_handlers_have_less() -> None:
    deaf, listener = started(), listening(started(), 0)
    for driver in (deaf, listener):
        driver.agent = replace(driver.agent, times=replace(TIMES, failure_grace_s=0.5))

        driver.exits(1, 3)

    assert [deadline_s(driver.agent) for driver in (deaf, listener)] == [START_S + 0.5, START_S + 2.0]


def test_who_saves_before_its_agent_knows_of_the_failure_has_the_time_too(driver: Driver) -> None:
    driver.happen(WorkerSaving(0, 0, 7))
    driver.exits(1, 3)

    driver.now_s += FAILURE_GRACE_S

    assert driver.happen(Tick()) == [signal(KILL, 2)]


def test_who_was_to_stop_for_another_signal_gets_that_one(driver: Driver) -> None:
    driver.happen(Signalled(INT, "SIGINT"))

    assert driver.happen(WorkerListens(0, 1, to_stop=False, to_failure=False)) == [signal(INT, 1)]


def test_from_the_boundary_on_they_have_the_stop_grace_to_save(driver: Driver) -> None:
    driver.sees(1, OpenKind.LEAVE, "node-b leaves")

    driver.now_s += 3
    reports_stopped(driver, *ALL)

    assert deadline_s(driver.agent) == START_S + 3 + STOP_GRACE_S


def test_who_saves_at_a_stop_keeps_the_time_for_it_when_a_peer_is_killed_meanwhile(driver: Driver) -> None:
    driver.sees(1, OpenKind.JOIN, "node-b joins")
    reports_stopped(driver, *ALL)
    for rank in (0, 2):
        driver.happen(WorkerSaving(0, rank, 7))

    notified = driver.exits(1, -KILL, FailureKind.SIGNAL)
    spared = driver.after(FAILURE_GRACE_S)

    assert (notified, spared) == ([], [])
    assert deadline_s(driver.agent) == START_S + STOP_GRACE_S


def test_where_no_order_follows_any_other_exit_is_a_failure(driver: Driver) -> None:
    reports_stopped(driver, *ALL)
    driver.exits(0, 0)
    driver.exits(1, 128 + TERM)

    done = driver.after(STOPPED_HOLD_S)

    assert done == [], "who has stopped is on its way out"
    assert [f.local_rank for f in driver.snapshot.failures[0]] == [1]


@pytest.mark.parametrize("signum", [1, 3, 10, 12])
def test_any_signal_that_a_scheduler_may_send_to_agent_and_workers_is_held(signum: int) -> None:
    driver = started()

    held = driver.exits(0, -signum)
    notified = driver.happen(Signalled(signum, "SIGX"))

    assert held == []
    assert notified == [signal(signum, 1, 2)]
    assert not driver.snapshot.failures


def test_a_signal_after_a_failure_disturbs_no_worker_that_saves() -> None:
    driver = listening(started(), 0)
    driver.exits(1, 3)

    done = driver.happen(Signalled(TERM, "SIGTERM"))

    assert done == [signal(TERM, 2)]
    assert reports_saved(driver, 0) == [signal(KILL, 0)]


def test_who_stopped_and_exits_with_any_code_after_a_signal_disturbs_no_worker_that_saves(driver: Driver) -> None:
    driver.happen(Signalled(TERM, "SIGTERM"))
    reports_stopped(driver, *ALL)

    assert driver.exits(0, 1) == []


def test_killed_workers_are_notified_of_no_failure() -> None:
    driver = started()
    listening(driver)
    for _ in range(2):
        driver.happen(Signalled(INT, "SIGINT"))

    notified = driver.exits(0, 1, FailureKind.EXCEPTION)

    assert notified == []
