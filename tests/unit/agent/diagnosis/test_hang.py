"""agent.diagnosis.hang: when workers that have reported before report nothing any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import (
    Blame,
    KeepStacks,
    LookAtStacks,
    PeerFailed,
    ShowStacks,
    SignalWorkers,
    TellWorkers,
)
from elaunch.agent.core.events import Reported, Signalled, StacksTaken, WorkerListens, WorkersHung
from elaunch.agent.diagnosis.hang import _REPORT_LOOK_S_MAX, Quiet, Standing, who_hangs
from elaunch.agent.diagnosis.stack_groups import Frame, Stack
from elaunch.rendezvous.types import FailureKind
from tests.unit.agent.diagnosis.test_stack_groups import ALL_REDUCE, GPU_WAIT, stack
from tests.unit.agent.driver import ALL, TERM, TIMES, Driver, failure, started


def hanging(hang_timeout_s: float = 30.0) -> Driver:
    driver = started()
    driver.agent = replace(driver.agent, times=replace(TIMES, hang_timeout_s=hang_timeout_s))
    return driver


def looks(driver: Driver, reports: list[int], *, every_s: float = 1.0, reporting: frozenset[int] = ALL) -> list[object]:
    """Give the agent these numbers of reports, one at each look. Returns its actions."""
    done: list[object] = []
    for number in reports:
        driver.now_s += every_s
        done += driver.happen(Reported(0, number, dict.fromkeys(reporting, Standing(7))))
    return done


def test_workers_that_report_nothing_for_the_timeout_are_looked_into_once() -> None:
    driver = hanging()
    driver.happen(WorkerListens(0, 2, to_stop=True, to_failure=False))
    # A worker that has stopped listening still has the thread that shows its stacks.
    for listens in (True, False):
        driver.happen(WorkerListens(0, 1, to_stop=listens, to_failure=listens))

    early = looks(driver, [5] * 30)
    struck = looks(driver, [5])
    later = looks(driver, [5] * 60)

    named = driver.happen(StacksTaken(0, (WAITS, BUSY)))

    assert early == []
    assert struck == [LookAtStacks(0, ALL), TellWorkers(0, frozenset({1, 2}), ShowStacks())]
    assert later == []
    kept, blamed = named
    assert isinstance(kept, KeepStacks)
    message = "hung: it reported nothing for 90 s since step 7; it runs in spin (train.py:12),"
    assert blamed == Blame(0, 1, message)
    assert "rank 1: spin (train.py:12)" in driver.said


@pytest.mark.parametrize("timeout_s", [0.0, 1000.0])
def test_without_a_timeout_or_within_it_nobody_hangs(timeout_s: float) -> None:
    assert looks(hanging(timeout_s), [5] * 900) == []


def test_before_the_first_report_nobody_hangs() -> None:
    assert looks(hanging(), [0] * 900, reporting=frozenset()) == []


def test_who_was_asleep_itself_does_not_count_that_time() -> None:
    driver = hanging()
    looks(driver, [5] * 10)

    after_sleep = looks(driver, [5], every_s=3600.0)
    awake = looks(driver, [5] * 18)
    struck = looks(driver, [5])

    assert after_sleep + awake == []
    assert len(struck) == 1
    assert _REPORT_LOOK_S_MAX == 2.0


def test_where_those_that_reported_have_ended_the_others_are_not_judged() -> None:
    driver = hanging()
    looks(driver, [5], reporting=frozenset({0}))
    driver.exits(0, 0)

    assert looks(driver, [5] * 100, reporting=frozenset({0})) == []


def test_when_their_stacks_are_taken_it_is_a_failure_of_the_group() -> None:
    driver = hanging()
    driver.happen(WorkerListens(0, 2, to_stop=True, to_failure=True))
    looks(driver, [5] * 40)

    done = driver.happen(WorkersHung(0, failure(0, 1, None, FailureKind.HANG)))

    assert done == [TellWorkers(0, frozenset({2}), PeerFailed(0)), SignalWorkers(0, frozenset({0, 1}), TERM)]
    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.HANG]
    assert "stopping 3 workers" in driver.said


def test_where_a_hang_is_only_warned_of_the_workers_go_on() -> None:
    driver = hanging()
    driver.agent = replace(driver.agent, restarts_hung=False, called="night")
    looks(driver, [5] * 40)

    done = driver.happen(WorkersHung(0, failure(0, 1, None, FailureKind.HANG)))

    assert done == []
    assert driver.snapshot.failures == {}
    assert "the job seems to hang: rank 1" in driver.said
    assert "elaunch restart night" in driver.said


WAITS = stack(0, *ALL_REDUCE)
BUSY = stack(1, Frame("spin", "/home/me/train.py", 12), active=True)
HELD = replace(WAITS, state="T")
GPU = stack(2, *GPU_WAIT, call="clock_nanosleep")
IN_COMMIT = replace(GPU, entered="in collective 38 of the default group (all_reduce)", waits=True)


@pytest.mark.parametrize(
    ("standings", "stacks", "rank", "words"),
    [
        (
            {0: Standing(7), 1: Standing(7), 2: Standing(7)},
            {},
            0,
            "hung: it reported nothing for 30 s since step 7, as did local rank 1, 2,",
        ),
        (
            {0: Standing(8), 1: Standing(7, "evaluating"), 2: Standing(8)},
            {},
            1,
            "hung: it reported nothing for 30 s since step 7, in its phase 'evaluating', while others had come to"
            " step 8,",
        ),
        ({3: Standing(-1, "loading")}, {}, 3, "hung: it reported nothing for 30 s, in its phase 'loading',"),
        # Ranks that wait are not named while one is elsewhere, whatever each reported last.
        (
            {0: Standing(7), 1: Standing(7), 2: Standing(7)},
            {0: WAITS, 1: BUSY, 2: WAITS},
            1,
            "hung: it reported nothing for 30 s since step 7; it runs in spin (train.py:12),",
        ),
        # One that has reported nothing is not judged, and says nothing of the others.
        (
            {0: Standing(7)},
            {0: WAITS, 1: BUSY},
            0,
            "hung: it reported nothing for 30 s since step 7; it waits in all_reduce (train_step, train.py:41),",
        ),
        (
            {0: Standing(7), 1: Standing(8), 2: Standing(7)},
            {0: WAITS, 1: HELD, 2: BUSY},
            1,
            "hung: it reported nothing for 30 s since step 8; it is stopped by a signal (SIGSTOP)"
            " (train_step, train.py:41),",
        ),
        # A commit of the Keeper waits for the GPU, which is in a collective, or may be: nobody has said it.
        (
            {0: Standing(7), 1: Standing(8), 2: Standing(7)},
            {0: IN_COMMIT, 1: BUSY, 2: GPU},
            1,
            "hung: it reported nothing for 30 s since step 8; it runs in spin (train.py:12),",
        ),
    ],
)
def test_who_is_not_where_the_others_wait_is_named_or_who_reported_least(
    standings: dict[int, Standing], stacks: dict[int, Stack], rank: int, words: str
) -> None:
    suspect = who_hangs(standings, stacks, 30.2)

    assert (suspect.local_rank, suspect.message) == (rank, words)


@pytest.mark.parametrize(
    ("standings", "stacks", "is_blameless"),
    [
        # Named by order, or by a step that others report a moment earlier.
        ({0: Standing(7), 1: Standing(7)}, {}, True),
        ({0: Standing(8), 1: Standing(7)}, {0: WAITS, 1: WAITS}, True),
        # The cause may be on another node, which is silent too.
        ({1: Standing(7)}, {1: BUSY}, True),
        ({0: Standing(7), 1: Standing(7)}, {0: BUSY, 1: BUSY}, True),
        ({0: Standing(7), 1: Standing(7)}, {0: WAITS, 1: BUSY}, False),
        ({0: Standing(7), 1: Standing(7)}, {0: WAITS, 1: HELD}, False),
    ],
)
def test_only_a_stack_that_differs_points_at_the_node(
    standings: dict[int, Standing], stacks: dict[int, Stack], is_blameless: bool
) -> None:
    assert who_hangs(standings, stacks, 30.2).is_blameless is is_blameless


def test_workers_that_stop_are_not_judged() -> None:
    driver = hanging()
    looks(driver, [5])
    driver.happen(Signalled(TERM, "SIGTERM"))

    assert looks(driver, [5] * 100) == []


def test_a_worker_that_fails_while_the_stacks_are_taken_is_the_failure() -> None:
    driver = hanging()
    looks(driver, [5] * 40)
    driver.exits(1, 3)

    assert driver.happen(WorkersHung(0, failure(0, 1, None, FailureKind.HANG))) == []
    assert [f.kind for f in driver.snapshot.failures[0]] == [FailureKind.EXIT_CODE]


def test_the_time_is_counted_anew_after_each_report() -> None:
    quiet = Quiet()
    for reports, now_s in ((3, 10.0), (3, 11.0), (3, 12.0), (4, 13.0), (4, 14.0)):
        quiet = quiet.after(reports, now_s)

    assert quiet.quiet_s == 1.0
