"""Rules of agent.core that only a case at their edge shows: rank 0, one of several, and what is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Blame
from elaunch.agent.core.events import Signalled, StoreFailed
from elaunch.agent.core.state import Clearing, Joining, Reach, Stopping
from elaunch.agent.core.store_outage import gives_up_at_s
from elaunch.agent.diagnosis.hang import HangState, stacks_are_due
from elaunch.agent.diagnosis.stack_groups import Stack, location_text
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.hang_verdict import Hang
from elaunch.rendezvous.store import Put
from tests.unit.agent.core.test_running_hangs import IDLE, SPINS, WAITING, busy, logged, samples, watching
from tests.unit.agent.core.test_timeline import kinds, named
from tests.unit.agent.diagnosis.causes.test_table import OOM, advice
from tests.unit.agent.diagnosis.causes.test_table import exited as exit_of
from tests.unit.agent.diagnosis.test_stack_groups import STEP, main_thread, stack
from tests.unit.agent.driver import ALL, INT, KEYS, SPEC, TERM, Driver, ends, started


def test_a_hang_of_rank_0_is_blamed_on_it() -> None:
    driver = watching(restarts=True)

    samples(driver, 80, {0: SPINS, 1: IDLE, 2: IDLE}, (busy(0), *WAITING[1:]))

    (blamed,) = (action for action in driver.all_acted if isinstance(action, Blame))
    assert blamed.local_rank == 0


def test_the_last_rank_of_a_job_that_no_rank_waits_for_is_no_failure() -> None:
    driver = watching(restarts=True)
    for rank in (0, 2):
        driver.exits(rank, 0)

    samples(driver, 900, {1: IDLE}, (stack(1, STEP, call="wait4"),))

    assert "after ranks 0, 2 exited with code 0" in logged(driver)
    assert not any(isinstance(action, Blame) for action in driver.all_acted)


def test_after_the_verdict_stacks_are_taken_once_more_in_each_further_limit() -> None:
    state = HangState(idle={0: ()}, samples=4)  # type: ignore[dict-item]

    assert [stacks_are_due(replace(state, idle_s=idle_s), 60.0) for idle_s in (179.0, 180.0)] == [False, True]


@pytest.mark.parametrize(("exited", "phase"), [(frozenset(), Stopping), (ALL, Clearing)])
def test_an_order_that_comes_twice_changes_nothing(driver: Driver, exited: frozenset[int], phase: type) -> None:
    driver.happen(Signalled(INT, "elaunch stop", is_order=True))
    for rank in exited:
        driver.exits(rank, -TERM)
    before = driver.agent

    assert isinstance(before.phase, phase)
    assert driver.happen(Signalled(INT, "elaunch stop", is_order=True)) == []
    assert driver.agent == before


def test_the_only_node_of_a_job_that_may_grow_announces_its_end() -> None:
    driver = started(replace(SPEC, nodes_max=2))

    driver.happen(Signalled(TERM, "SIGTERM"))
    ends(driver, -TERM)

    assert kinds(driver) == ["end"]


def test_a_head_that_never_answered_is_waited_for_as_any_store() -> None:
    joining = Driver(SPEC).begin().agent
    assert isinstance(joining.phase, Joining)
    times = joining.times
    never = replace(
        joining, reach=Reach(failing_since_s=10.0, last=StoreFailed("", is_heads=True), silent_since_s=10.0)
    )
    lost = replace(never, reach=replace(never.reach, ever=True))

    assert gives_up_at_s(never) == 10.0 + times.store_wait_s
    assert gives_up_at_s(lost) == 10.0 + times.store_timeout_s
    assert times.store_wait_s != times.store_timeout_s


@pytest.mark.parametrize(("lines", "has_step"), [(2, True), (3, False)])
def test_of_an_exit_code_the_last_three_lines_are_about_it(lines: int, has_step: bool) -> None:
    tail = f"{OOM}\n" + "".join(f"step {number}\n" for number in range(lines))

    assert ("make room" in advice(exit_of(1, tail))) is has_step


def test_a_main_thread_without_a_frame_has_no_place() -> None:
    assert location_text(Stack(0, 7, (main_thread(),), "S")) == "no Python frame"


def test_the_timeline_and_on_event_name_rank_0_and_no_rank_where_none_is_named() -> None:
    for rank, fields in ((0, {"rank": 0}), (-1, {})):
        driver = started()
        driver.agent = replace(driver.agent, restarts_hung=False)
        driver.write(Put(KEYS.hang, encode(Hang(0, driver.node_id, rank, "hung: it sleeps,"))))
        driver.settle()

        (hung,), (notified,) = named(driver, "seems_hung"), driver.announcements
        for found in (hung.fields, notified.fields):
            assert {key: value for key, value in found.items() if key == "rank"} == fields


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_restart_is_suggested_only_where_the_job_may_restart(max_restarts: int) -> None:
    driver = watching()
    driver.agent = replace(driver.agent, spec=replace(driver.agent.spec, max_restarts=max_restarts))

    samples(driver, 80, {0: IDLE, 1: SPINS, 2: IDLE}, (WAITING[0], busy(1), WAITING[2]))

    assert ("to restart the workers: elaunch restart " in logged(driver)) is bool(max_restarts)
    assert ("start the job with --on-hang restart" in logged(driver)) is bool(max_restarts)
