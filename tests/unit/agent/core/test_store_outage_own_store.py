"""agent.core.store_outage: the process of the store that this host served has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Exit
from elaunch.agent.core.events import Cleared, OwnStoreLost, Signalled, StoreAway, StoreBack, Tick
from elaunch.agent.core.state import Finished, Running
from elaunch.agent.core.step import deadline_s
from elaunch.rendezvous.types import FailureKind, OutcomeKind
from tests.unit.agent.driver import INT, SPEC, TWO, Driver, ends, pair, settle, started

GONE = OwnStoreLost("the job's store, which this host served (pid 7), was killed by SIGKILL")
RANGE = replace(SPEC, nodes_min=1, nodes_max=2)


def test_it_is_said_at_once_and_the_workers_go_on() -> None:
    driver = started(RANGE)
    driver.happen(StoreAway("refused", is_heads=True))

    driver.happen(GONE)
    said = driver.said
    driver.happen(StoreAway("refused", is_heads=True))
    driver.now_s += 1_000_000
    driver.happen(Tick())

    assert said == f"{GONE.why}; the workers go on, but none can be restarted, and no node can join"
    assert driver.said == ""
    assert isinstance(driver.agent.phase, Running)
    assert deadline_s(driver.agent) is None


@pytest.mark.parametrize("is_first", [False, True], ids=["the workers", "the store"])
def test_how_other_nodes_do_is_not_known_and_not_waited_for(is_first: bool) -> None:
    first, _ = pair()
    if is_first:
        first.happen(GONE)
    ends(first)
    if not is_first:
        assert isinstance(first.agent.phase, Finished)
        first.happen(GONE)

    assert first.outcome.exit_code == 3
    assert first.outcome.reason == (
        f"{GONE.why}; this node's workers have all exited with 0, and this node cannot know how the others are doing"
    )


def test_a_node_that_knows_that_all_others_were_done_ends_well() -> None:
    first, second = pair()
    ends(second)
    settle(first, second)
    first.happen(GONE)

    ends(first)

    assert first.outcome.exit_code == 0


def test_a_worker_that_fails_then_fails_the_job_and_its_last_words_are_in_the_report() -> None:
    driver = started(RANGE)
    driver.happen(GONE)
    driver.exits(0, 3, FailureKind.EXIT_CODE)
    driver.exits(1, -15)
    driver.exits(2, -15)

    driver.happen(Cleared(0, tails={0: "its last words"}))

    assert (driver.outcome.kind, driver.outcome.exit_code) == (OutcomeKind.FAILED, 1)
    assert driver.outcome.reason == f"{GONE.why}, so nothing can be restarted"
    assert driver.outcome.failure
    assert (driver.outcome.failure.local_rank, driver.outcome.failure.tail) == (0, "its last words")


def test_a_node_that_waits_for_its_workers_start_ends_at_once() -> None:
    driver = Driver(TWO).begin()
    driver.happen(StoreBack())

    done = driver.happen(GONE)

    assert [type(action) for action in done] == [Exit]
    assert (driver.outcome.exit_code, driver.outcome.reason) == (3, f"{GONE.why}; no worker can start without it")


def test_a_job_of_this_node_alone_ends_well_with_its_workers() -> None:
    driver = started(RANGE)
    driver.happen(GONE)

    ends(driver)

    assert (driver.outcome.kind, driver.outcome.exit_code) == (OutcomeKind.SUCCEEDED, 0)


def test_ctrl_c_says_that_the_other_nodes_do_not_hear_of_it() -> None:
    first, _ = pair()
    first.happen(GONE)

    first.happen(Signalled(INT, "SIGINT"))

    assert "press Ctrl-C there too" in first.said
