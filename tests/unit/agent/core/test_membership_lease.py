"""agent.core.membership: a node whose lease has ended, in each of its phases."""

from __future__ import annotations

import pytest

from elaunch.agent.core.actions import Action, Join, Renew, SignalWorkers
from elaunch.agent.core.events import Event, Leased, LeaseLost, Signalled, Tick
from elaunch.agent.core.state import Finished, Running
from elaunch.agent.core.step import deadline_s, step
from elaunch.rendezvous.types import OpenKind
from tests.unit.agent.driver import (
    ALL,
    INT,
    TERM,
    TIMES,
    TWO,
    Driver,
    ends,
    pair,
    settle,
    started,
)


def test_a_running_node_whose_lease_ended_goes_on_as_the_same_member_if_nothing_was_opened() -> None:
    first, second = pair()
    me, workers = second.node_id, second.agent.phase

    renewed = second.lose_lease()
    gone = set(second.snapshot.members)
    done = second.settle()

    assert (renewed, done) == ([Renew()], [])
    assert gone == {first.node_id}
    assert set(second.snapshot.members) == {first.node_id, me}
    assert (second.node_id, second.agent.phase) == (me, workers)


def test_a_running_node_whose_lease_ended_stops_first_and_joins_as_a_new_one_if_a_generation_was_opened() -> None:
    first, second = pair()
    old = second.node_id
    second.lose_lease()
    first.settle()
    assert first.snapshot.generation
    assert first.snapshot.generation.kind is OpenKind.LOSS

    stopped = second.settle()
    while_it_stops = (second.node_id, set(second.snapshot.members))
    ends(second, -TERM)
    ends(first, -TERM)
    settle(first, second)

    assert stopped == [SignalWorkers(0, ALL, TERM)]
    assert while_it_stops == (old, {first.node_id})
    assert second.node_id != old
    assert isinstance(second.agent.phase, Running)
    assert second.agent.phase.table.generation == 1
    assert second.agent.phase.table.restarts == 0


def test_a_stopping_node_whose_lease_ended_comes_back_as_a_new_one_once_its_workers_are_gone() -> None:
    first, second = pair()
    old = second.node_id
    first.exits(0, 3)
    second.settle()
    second.lose_lease()
    second.settle()

    while_it_stops = second.node_id
    ends(second, -TERM)
    ends(first, -TERM)
    settle(first, second)

    assert while_it_stops == old
    assert second.node_id != old
    assert isinstance(second.agent.phase, Running)


def end_leases_early(driver: Driver, seconds: float, held_s: float = 1.6) -> tuple[list[Action], int]:
    """For `seconds` the store ends each lease after `held_s`. Returns the agent's actions and its number of leases."""
    actions: list[Action] = []
    end_s, leases, lease = driver.now_s + seconds, 0, 1000
    happened: Event | None = Leased(lease, f"a-{lease}")
    while happened and driver.now_s < end_s:
        driver.agent, more = step(driver.agent, happened, driver.now_s)
        actions += more
        match happened:
            case Leased():
                leases += 1
                driver.now_s += held_s
                happened = LeaseLost(lease)
            case _ if any(isinstance(action, Renew) for action in more):
                lease += 1
                happened = Leased(lease, f"a-{lease}")
            case _:
                due_s = deadline_s(driver.agent)
                driver.now_s, happened = due_s or 0.0, Tick() if due_s else None
    return actions, leases


def test_leases_that_end_at_once_are_not_begun_at_once() -> None:
    driver = Driver()

    _, leases = end_leases_early(driver, 60, 0.0)

    assert leases <= 60 / TIMES.keepalive_s + 2


def test_leases_that_end_again_and_again_do_not_hide_a_loss_for_ever() -> None:
    first, _ = pair()
    until_s = [first.agent.lossless_until_s]
    hidden_s, step_s = 0.0, 0.1
    for lease in range(1000, 1200):
        for event in (Leased(lease, f"a-{lease}"), LeaseLost(lease)):
            first.agent, _ = step(first.agent, event, first.now_s)
        until_s.append(first.agent.lossless_until_s)
        hidden_s += step_s * (first.now_s < until_s[-1])
        first.now_s += step_s

    assert 0.3 < hidden_s / (200 * step_s) < 0.7


def test_a_joining_node_whose_lease_ended_comes_back_under_a_new_name() -> None:
    first, second = pair(TWO)
    spare = Driver(TWO, store=first.store, host="node-c", remote=True).begin()
    spare.settle()
    old = spare.node_id

    assert spare.lose_lease() == [Renew()]
    done = spare.settle()

    assert done == [Join(spare.lease, False, False)]
    assert spare.node_id != old
    assert set(spare.snapshot.members) == {first.node_id, second.node_id, spare.node_id}


def test_a_finished_node_whose_lease_ended_stays_the_same_member_if_nothing_was_opened() -> None:
    first, second = pair()
    ends(second)
    me = second.node_id
    assert isinstance(second.agent.phase, Finished)

    second.lose_lease()
    settle(first, second)

    assert set(second.snapshot.members) == {first.node_id, me}
    ends(first)
    settle(first, second)
    assert (first.outcome.exit_code, second.outcome.exit_code) == (0, 0)


@pytest.mark.parametrize("signum", [INT, TERM])
def test_a_node_on_its_way_out_begins_no_other_lease(signum: int) -> None:
    driver = started()
    driver.happen(Signalled(signum, "SIGX"))

    assert driver.lose_lease() == []


def test_that_an_older_lease_ended_is_no_news() -> None:
    driver = started()
    before = driver.agent

    assert driver.happen(LeaseLost(driver.lease + 1)) == []
    assert driver.agent == before
