"""agent.core.membership: who starts a run, on an id that is new, was used before, or is what is left of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Log
from elaunch.agent.core.events import StoreBack, StoreFailed, Tag, Tick, Trouble
from elaunch.agent.core.state import Joining
from elaunch.agent.core.step import deadline_s
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.store import Delete, Put
from elaunch.rendezvous.types import Generation, Node, OpenKind, Outcome, OutcomeKind, Program, ProgramKind
from tests.unit.agent.driver import KEYS, SPEC, TIMES, TWO, Driver, ends, pair, tags


def vacant() -> Driver:
    driver = Driver(remote=True)
    driver.write(Put(KEYS.member("node-x-1"), "{}"))
    driver.begin().settle()
    return driver


def at_next_deadline(driver: Driver) -> None:
    """Advance to the next deadline, and do what is due on the way."""
    due_s = driver.agent.lead_at_s
    assert due_s is not None
    while driver.now_s < due_s:
        driver.now_s = min(due_s, deadline_s(driver.agent) or due_s)
        driver.happen(Tick())
    driver.settle()


def test_a_run_on_an_old_id_does_not_end_with_the_last_one() -> None:
    """The answer may arrive before the watch reports that the key of the last run's end is gone."""
    driver, _ = another_run()
    driver.answer()
    driver.sync()

    driver.answer()

    assert isinstance(driver.agent.phase, Joining)
    driver.settle()
    assert driver.snapshot.generation == Generation(4, OpenKind.START, "the job starts")
    assert driver.node_id in driver.snapshot.joined[4]


def first_run() -> tuple[Driver, Tag]:
    return Driver(remote=True).begin(), Tag.RUN


def another_run() -> tuple[Driver, Tag]:
    driver = Driver(remote=True)
    driver.write(Put(KEYS.generation, encode(Generation(3, OpenKind.FAIL, "a worker failed"))))
    driver.write(Put(KEYS.ended, encode(Outcome(OutcomeKind.SUCCEEDED, "every worker exited with 0", 3, 3, 3))))
    return driver.begin(), Tag.RUN


def a_run_of_others() -> tuple[Driver, Tag]:
    first = Driver(TWO).begin()
    first.settle()
    return Driver(TWO, host="node-b", store=first.store, remote=True).begin(), Tag.JOIN


@pytest.mark.parametrize("enter", [first_run, another_run, a_run_of_others])
def test_who_has_entered_a_run_by_any_way_outlasts_that_the_store_denies_it(
    enter: Callable[[], tuple[Driver, Tag]],
) -> None:
    driver, by = enter()
    # First comes the answer about its own lease, then a snapshot.
    driver.answer()
    driver.sync()
    assert tags(driver) == [by]
    driver.answer()

    driver.happen(StoreFailed("permission denied", Trouble.DENIED))

    assert isinstance(driver.agent.phase, Joining)
    driver.happen(StoreBack())
    driver.settle()
    assert driver.node_id in driver.snapshot.members


def test_of_two_nodes_that_come_at_once_one_starts_the_run_and_the_other_joins_it() -> None:
    first = Driver(TWO, remote=True).begin()
    second = Driver(TWO, host="node-b", store=first.store, remote=True).begin()
    for driver in (first, second):
        driver.answer()
    nothing = second.snapshot_changed
    for driver in (first, second):
        driver.happen(nothing)
        assert tags(driver) == [Tag.RUN]
    second.answer()
    second.happen(nothing)
    assert tags(second) == []

    first.answer()
    second.sync()

    assert tags(second) == [Tag.JOIN]


def test_a_run_that_was_first_and_is_of_another_command_is_not_taken_for_this_nodes_own() -> None:
    driver = Driver(remote=True)
    driver.begin().answer()
    nothing = driver.snapshot_changed
    other = replace(SPEC, program=Program(ProgramKind.SCRIPT, "other.py")).terms
    ended = Outcome(OutcomeKind.SUCCEEDED, "every worker exited with 0", 0, 0, 3)
    driver.write(
        Put(KEYS.spec, encode(other)),
        Put(KEYS.generation, encode(Generation(0, OpenKind.START, "the job starts"))),
        Put(KEYS.ended, encode(ended)),
    )
    driver.happen(nothing)
    driver.answer()

    driver.sync()

    assert tags(driver) == [Tag.RUN]
    driver.settle()
    assert driver.snapshot.generation == Generation(1, OpenKind.START, "the job starts")


def of_another_command_that_has_ended() -> Driver:
    driver = Driver(remote=True)
    other = replace(SPEC, program=Program(ProgramKind.SCRIPT, "other.py")).terms
    driver.write(
        Put(KEYS.member("node-x-1"), "{}"),
        Put(KEYS.spec, encode(other)),
        Put(KEYS.generation, encode(Generation(0, OpenKind.START, "the job starts"))),
        Put(KEYS.ended, encode(Outcome(OutcomeKind.SUCCEEDED, "every worker exited with 0", 0, 0, 3))),
    )
    driver.begin().settle()
    return driver


@pytest.mark.parametrize("make", [vacant, of_another_command_that_has_ended])
def test_who_may_not_start_a_run_tries_again_only_after_a_lease_time(make: Callable[[], Driver]) -> None:
    driver = make()

    tried = bool(driver.commits)
    for _ in range(3):
        driver.sync()
        tried |= bool(driver.commits)

    assert not tried
    assert isinstance(driver.agent.phase, Joining)
    assert driver.agent.lead_at_s == driver.now_s + TIMES.lease_ttl_s


def test_members_that_never_go_and_no_generation_are_no_job() -> None:
    driver = vacant()

    for _ in range(10):
        if isinstance(driver.agent.phase, Joining):
            at_next_deadline(driver)

    logged = [action.text for action in driver.all_acted if isinstance(action, Log)]
    assert logged[0].startswith("waiting for members that an earlier job job left in the store")

    assert driver.outcome.kind is OutcomeKind.UNKNOWN
    assert "delete its keys, all that begin with /elaunch/job/" in driver.outcome.reason


@pytest.mark.parametrize("enter", [first_run, another_run, a_run_of_others])
def test_who_is_denied_before_it_has_entered_is_refused(enter: Callable[[], tuple[Driver, Tag]]) -> None:
    driver, _ = enter()
    driver.answer()
    driver.sync()

    driver.happen(StoreFailed("permission denied", Trouble.DENIED))

    assert driver.outcome.kind is OutcomeKind.REFUSED


def test_a_leader_that_was_cut_off_gives_the_others_time_to_join_before_it_evicts_anybody() -> None:
    one, other = pair(slots=1)
    ends(one, 3)
    one.settle()

    one.happen(StoreFailed("no response"))
    one.after(TIMES.form_deadline_s + 1)
    one.happen(StoreBack())
    one.sync()

    assert other.node_id in one.snapshot.members


def test_a_newcomer_that_waited_for_the_store_starts_no_run_over_one_whose_members_were_away_too() -> None:
    newcomer = Driver(remote=True)
    newcomer.write(Put(KEYS.generation, encode(Generation(3, OpenKind.JOIN, "node-b joins"))))
    newcomer.happen(StoreFailed("no response"))
    newcomer.begin().settle()
    newcomer.happen(StoreBack())
    newcomer.settle()
    before = newcomer.generation

    # A node that ran this generation is back: it writes its member key, and leads.
    member = KEYS.member("node-b-1")
    newcomer.write(Put(member, encode(Node("node-b-1", "node-b", "10.0.0.2", 1))), Put(KEYS.leader, "node-b-1"))
    newcomer.settle()

    assert before.number == 3
    assert newcomer.node_id in newcomer.snapshot.joined[3]


def test_a_newcomer_starts_a_run_over_one_whose_members_do_not_come_back() -> None:
    newcomer = Driver(remote=True)
    newcomer.write(Put(KEYS.generation, encode(Generation(3, OpenKind.JOIN, "node-b joins"))), Delete(KEYS.leader))
    newcomer.happen(StoreFailed("no response"))
    newcomer.begin().settle()
    newcomer.happen(StoreBack())
    assert isinstance(newcomer.agent.phase, Joining)

    due_s = deadline_s(newcomer.agent)
    assert due_s is not None
    newcomer.now_s = max(newcomer.now_s, due_s) + TIMES.return_grace_s
    newcomer.happen(Tick())
    newcomer.settle()

    assert newcomer.generation.kind is OpenKind.START
