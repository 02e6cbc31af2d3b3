"""agent.core.store_outage: log lines about an unreachable store and about long waits, and when the agent gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import SignalWorkers
from elaunch.agent.core.events import StoreBack, StoreFailed, Tick, Trouble
from elaunch.agent.core.membership import INVITE_AGAIN_S
from elaunch.agent.core.state import LOG_AFTER_S, Joining, Running
from elaunch.agent.core.step import deadline_s
from elaunch.rendezvous.types import OpenKind, OutcomeKind
from tests.unit.agent.driver import ALL, SPEC, START_S, TERM, TIMES, TWO, Driver, ends, pair, settle

# --- the store is unreachable


def test_a_store_that_stays_away_is_named_once_with_the_newest_reason_and_its_return_is_too(driver: Driver) -> None:
    driver.happen(StoreBack())
    driver.happen(StoreFailed("10.0.0.9:2379 refuses connections"))
    assert deadline_s(driver.agent) == START_S + LOG_AFTER_S
    driver.now_s += 1
    driver.happen(StoreFailed("10.0.0.8:2379 did not answer within 0.5 s"))
    driver.after(1)
    logged = driver.logged
    driver.after(1)
    again = driver.logged
    driver.now_s += 0.5
    driver.happen(StoreBack())

    assert logged == (
        "the store is unreachable: 10.0.0.8:2379 did not answer within 0.5 s; trying again; the workers continue"
    )
    assert (again, driver.logged) == ("", "the store is back after 3.5 s")


def test_a_store_that_was_never_there_is_waited_for_with_a_hint_on_what_may_be_wrong() -> None:
    driver = Driver()
    driver.happen(StoreFailed("10.0.0.9:2379 refuses connections"))
    driver.after(LOG_AFTER_S)
    logged = driver.logged
    driver.now_s += 3
    driver.happen(StoreBack())

    assert logged == (
        "waiting for the store for up to 598 s more: 10.0.0.9:2379 refuses connections; is it running there,"
        " and is --rdzv-endpoint right?"
    )
    assert driver.logged == "the store responds, after 5.0 s"


def test_a_leader_that_was_cut_off_declares_no_node_lost_before_the_others_could_come_back() -> None:
    first, second = pair()
    first.happen(StoreFailed("no route"))
    first.now_s += 20
    second.store.revoke(second.lease)
    first.happen(StoreBack())

    early = first.settle()
    due_s = deadline_s(first.agent)
    first.now_s += TIMES.return_grace_s
    late = first.happen(Tick()) + first.settle()

    assert early == []
    assert due_s == START_S + 20 + TIMES.return_grace_s
    assert late == [SignalWorkers(0, ALL, TERM)]
    assert first.generation.kind is OpenKind.LOSS


def test_a_store_that_was_never_reached_is_given_up_after_the_join_timeout() -> None:
    driver = Driver().begin()
    driver.happen(StoreFailed("10.0.0.9:2379 refuses connections"))
    early = driver.after(TIMES.join_timeout_s - 1)
    assert deadline_s(driver.agent) == START_S + TIMES.join_timeout_s

    done = driver.after(1)

    assert early == []
    assert done == []
    assert (driver.outcome.kind, driver.outcome.exit_code) == (OutcomeKind.UNKNOWN, 3)
    assert driver.outcome.reason == (
        "the store was never reached for 600 s (10.0.0.9:2379 refuses connections); how the job ended is not known here"
    )


@pytest.mark.parametrize(("is_heads", "wait_s"), [(True, TIMES.store_timeout_s), (False, TIMES.join_timeout_s)])
@pytest.mark.parametrize("finished", [False, True])
def test_an_agent_without_workers_gives_up_a_heads_store_sooner_than_any_other(
    finished: bool, is_heads: bool, wait_s: float
) -> None:
    first, second = pair()
    second.happen(StoreBack())
    if finished:
        ends(second)
    else:
        first.exits(0, 3)
        second.settle()
        ends(second, -TERM)
    second.happen(StoreFailed("no route", is_heads=is_heads))
    second.after(wait_s - 1)
    assert not second.agent.ending

    second.after(1)

    own = "; this node's workers had all exited with 0" if finished else ""
    assert second.outcome.exit_code == 3
    again = "; to start the job again, type its command on all nodes; if the host" if is_heads else ""
    assert second.outcome.reason.startswith(
        f"the store did not answer for {wait_s:.0f} s (no route){own}; how the job ended is not known here{again}"
    )
    assert ("--rdzv-endpoint" in second.outcome.reason) == is_heads


SILENT = StoreFailed("no answer", is_heads=True, is_silent=True)
REFUSED = StoreFailed("connection refused", is_heads=True)


def test_workers_are_stopped_when_the_heads_host_has_been_silent_for_the_store_timeout() -> None:
    _, second = pair()
    second.happen(StoreBack())
    second.happen(SILENT)
    second.after(LOG_AFTER_S)
    logged = second.logged
    second.now_s = START_S + TIMES.store_timeout_s - 1
    second.happen(SILENT)
    early = second.happen(Tick())
    due_s = deadline_s(second.agent)

    done = second.after(1)
    ends(second, -TERM)

    assert (
        logged == "the store is unreachable: no answer; the workers continue, and are stopped in 58 s if that lasts"
        " (store_timeout)"
    )
    assert (early, due_s) == ([], START_S + TIMES.store_timeout_s)
    assert done == [SignalWorkers(0, ALL, TERM)]
    assert second.outcome.exit_code == 3


# --- the store responds, and refuses

FULL = StoreFailed("etcd-a:2379: etcd is full (alarm NOSPACE)", Trouble.REFUSES)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (FULL, "refuses this node's requests: etcd-a:2379: etcd is full (alarm NOSPACE)"),
        (StoreFailed("no answer within 1 s", Trouble.SLOW), "is too slow: no answer within 1 s"),
        (StoreFailed("no permission", Trouble.DENIED), "denies this node's requests: no permission"),
        (StoreFailed("too many open files", Trouble.OWN), "cannot be connected to: too many open files"),
    ],
)
def test_each_trouble_has_its_own_line_while_the_workers_run(driver: Driver, event: StoreFailed, text: str) -> None:
    driver.happen(StoreBack())
    driver.happen(event)

    driver.after(LOG_AFTER_S)

    assert driver.logged == f"the store {text}; trying again; the workers continue"
    assert isinstance(driver.agent.phase, Running)


def test_the_time_to_give_up_is_counted_from_when_the_workers_are_gone(driver: Driver) -> None:
    """The time counts from the workers' end. Otherwise a failure late in a long outage would end the job at once."""
    driver.happen(StoreBack())
    driver.happen(FULL)
    driver.after(10 * TIMES.join_timeout_s)
    ends(driver, -9)
    gone_s = driver.now_s

    driver.after(TIMES.join_timeout_s - 1)
    early = driver.agent.phase
    driver.now_s = gone_s + TIMES.join_timeout_s
    driver.happen(Tick())

    assert isinstance(early, Joining)
    assert driver.outcome.exit_code == 3


# --- what is waited for


def test_what_a_leader_waits_for_is_logged_when_it_takes_long_and_once() -> None:
    driver = Driver(TWO).begin()
    driver.settle()
    due_s = deadline_s(driver.agent)
    driver.after(LOG_AFTER_S)
    logged = driver.logged
    driver.after(60)

    assert due_s == START_S + LOG_AFTER_S
    assert (logged, driver.logged) == ("waiting for nodes: 1 of 2 is here (gives up after 600 s)", "")


def test_a_follower_logs_who_knows_what_is_waited_for() -> None:
    three = replace(SPEC, nodes_min=3, nodes_max=3)
    first = Driver(three).begin()
    second = Driver(three, store=first.store, host="node-b", remote=True).begin()
    settle(first, second)

    second.after(LOG_AFTER_S)

    assert second.logged == "waiting for generation 0; its leader, on node-a, logs what it waits for"


def test_an_absent_store_is_named_again_when_the_workers_have_exited(driver: Driver) -> None:
    driver.happen(StoreBack())
    driver.happen(StoreFailed("no route"))
    driver.after(LOG_AFTER_S)
    ends(driver, -9)
    driver.happen(Tick())

    assert driver.logged.startswith("the store is unreachable: no route; no worker can start before it is back")


def test_workers_go_on_while_the_heads_host_answers_though_its_store_does_not() -> None:
    _, second = pair()
    second.happen(StoreBack())
    for event in (REFUSED, SILENT, REFUSED, SILENT):
        second.happen(event)
        second.after(TIMES.store_timeout_s - 1)

    assert isinstance(second.agent.phase, Running)


def test_a_failure_late_in_the_silence_of_the_heads_host_begins_no_new_wait() -> None:
    _, second = pair()
    second.happen(StoreBack())
    second.happen(SILENT)
    second.now_s += TIMES.store_timeout_s - 1
    ends(second, -9)

    second.after(1)

    assert second.outcome.exit_code == 3


def test_the_line_for_the_other_nodes_comes_again_after_a_minute_and_once() -> None:
    driver = Driver(TWO)
    driver.agent = replace(driver.agent, invitation="on the other node type: elaunch …")
    driver.begin().settle()
    logged = []
    for second in range(200):
        driver.after(1)
        logged += [(second + 1, driver.logged)] if driver.logged else []

    assert [at_s for at_s, _ in logged] == [LOG_AFTER_S, LOG_AFTER_S + INVITE_AGAIN_S]
    assert logged[1][1] == "on the other node type: elaunch …"


def test_an_endpoint_of_this_host_alone_is_logged_where_the_other_node_does_not_come() -> None:
    first, second = Driver(TWO), Driver(TWO)
    for driver in (first, second):
        driver.agent = replace(driver.agent, only_here="localhost:5 is an address of this host alone")
    first.begin().settle()
    second.happen(StoreFailed("localhost:5 refuses connections"))
    for driver in (first, second):
        driver.after(LOG_AFTER_S)

    assert first.logged.endswith("1 of 2 is here (gives up after 600 s); localhost:5 is an address of this host alone")
    assert second.logged.endswith("localhost:5 refuses connections; localhost:5 is an address of this host alone")
