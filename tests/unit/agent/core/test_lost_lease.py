"""agent.membership: a node whose lease has ended, in each of its phases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Action, Exit, Join, Renew, Say, SignalWorkers
from elaunch.agent.core.events import Leased, LeaseLost, Looked, Signalled, Tag
from elaunch.agent.core.phases import Finished, Running
from elaunch.agent.core.step import step
from elaunch.rendezvous.types import OpenKind, OutcomeKind
from tests.unit.agent.driver import (
    ALL,
    INT,
    TERM,
    TWO,
    Driver,
    ends,
    pair,
    settle,
    started,
    tags,
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


def test_a_return_that_comes_too_late_is_refused_and_the_node_stops() -> None:
    first, second = pair()
    second.lose_lease()
    first.settle()
    second.answer()

    late = second.happen(Looked(replace(second.agent.snapshot, revision=second.agent.snapshot.revision)))

    assert late == []
    assert tags(second) == [Tag.RETURN]
    done = second.settle()
    assert done == [SignalWorkers(0, ALL, TERM)]
    old = second.node_id
    ends(second, -TERM)
    assert second.node_id != old


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


def test_a_finished_node_whose_lease_ended_runs_again_as_a_new_one_if_a_generation_was_opened() -> None:
    first, second = pair()
    ends(second)
    old = second.node_id
    second.lose_lease()
    first.exits(0, 3)
    second.settle()
    ends(first, -TERM)
    settle(first, second)

    assert second.node_id != old
    assert isinstance(second.agent.phase, Running)
    assert second.agent.phase.table.generation == 1


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


def test_a_leader_whose_lease_ended_leads_no_more_until_it_is_elected_again() -> None:
    first, second = pair()
    first.lose_lease()

    second.settle()
    first.settle()

    assert second.snapshot.leader == second.node_id
    assert not first.agent.leads
    assert second.agent.leads


def end_leases_early(driver: Driver, times: int) -> list[Action]:
    """The store ends each of so many leases 0.9 s after it has begun; what the agent does."""
    actions: list[Action] = []
    for lease in range(1000, 1000 + times):
        for event in (Leased(lease, f"a-{lease}"), LeaseLost(lease)):
            driver.agent, more = step(driver.agent, event, driver.now_s)
            actions += more
            driver.now_s += 0.9 * isinstance(event, Leased)
    return actions


def test_leases_that_end_before_their_time_are_told_of_and_not_each_time() -> None:
    first, _ = pair()

    said = [action.text for action in end_leases_early(first, 30) if isinstance(action, Say)]

    assert said[0] == (
        "the store says that this node's lease has ended 0.9 s after it began, though it holds for 3 s: another client"
        " of the store ends it, or a proxy answers in the store's place; beginning another lease"
    )
    assert len(said) == 1
    assert isinstance(first.agent.phase, Running)


def test_a_node_without_workers_gives_up_if_no_lease_lasts_for_join_timeout() -> None:
    driver = Driver()

    actions = end_leases_early(driver, int(driver.agent.times.join_timeout_s / 0.9) + 3)

    (exits,) = [action for action in actions if isinstance(action, Exit)]
    assert exits.outcome.kind is OutcomeKind.UNKNOWN
    assert "or a proxy answers in the store's place; so it was for 600 s" in exits.outcome.reason


def test_a_lease_that_lasted_begins_the_time_to_give_up_anew() -> None:
    driver = Driver()
    many = int(driver.agent.times.join_timeout_s / 0.9) - 5
    end_leases_early(driver, many)
    for event in (Leased(7, "a-7"), LeaseLost(7)):
        driver.agent, _ = step(driver.agent, event, driver.now_s)
        driver.now_s += 100

    actions = end_leases_early(driver, many)

    assert not [action for action in actions if isinstance(action, Exit)]
