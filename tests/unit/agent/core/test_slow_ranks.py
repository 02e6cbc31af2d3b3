"""agent.core.slow_ranks: which rank the others wait for."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elaunch.agent.core.slow_ranks import WINDOW_S, WINDOWS, Slow, SlowRanks
from elaunch.agent.core.standstill import Window

LOOK_S = 5.0


def look(busy: float, *, delayed: float = 0.0, state: str = "S", seconds: float = LOOK_S) -> Window:
    return Window(seconds, busy * seconds, busy * seconds, delayed * seconds, faults=0, state=state)


def named(looks: Mapping[int, Window], count: int, state: SlowRanks | None = None) -> tuple[SlowRanks, list[Slow]]:
    """What is named while the ranks look like this `count` times."""
    state, found = state or SlowRanks(), []
    for _ in range(count):
        state, slow = state.after(looks)
        found += [slow] if slow else []
    return state, found


ENOUGH = int(WINDOWS * WINDOW_S / LOOK_S)
SKEWED = {0: look(0.7), 1: look(0.98), 2: look(0.65)}


def test_a_rank_that_works_while_the_others_wait_is_named_after_two_minutes() -> None:
    state, early = named(SKEWED, ENOUGH - 1)

    _, found = named(SKEWED, 1, state)

    assert early == []
    assert [(slow.local_rank, round(slow.wait_share, 3), slow.lasted_s) for slow in found] == [(1, 0.305, 120.0)]


@pytest.mark.parametrize(
    "looks",
    [
        {0: look(0.95), 1: look(0.98)},
        {0: look(0.7), 1: look(0.98), 2: look(0.97)},
        {0: look(0.1), 1: look(0.4)},
        {0: look(0.0), 1: look(1.0)},
        {0: look(0.99)},
        {},
    ],
    ids=["alike", "two slow ones", "both wait", "the others do nothing", "alone", "nobody"],
)
def test_nobody_is_named_where_no_rank_makes_all_others_wait(looks: Mapping[int, Window]) -> None:
    assert named(looks, 3 * ENOUGH)[1] == []


def test_one_that_is_slow_now_and_then_is_not_named() -> None:
    state, found = named(SKEWED, ENOUGH - 4)
    state, more = named({0: look(0.98), 1: look(0.7), 2: look(0.65)}, 4, state)
    _, last = named(SKEWED, ENOUGH - 4, state)

    assert found + more + last == []


def test_time_in_the_queue_for_a_cpu_and_for_a_disk_is_work_too() -> None:
    looks = {0: look(0.3), 1: look(0.2, delayed=0.75), 2: look(0.3)}
    disk = {0: look(0.3), 1: look(0.2, state="D"), 2: look(0.3)}

    assert [[slow.local_rank for slow in named(each, ENOUGH)[1]] for each in (looks, disk)] == [[1], [1]]


@pytest.mark.parametrize("other", [{0: look(0.7), 1: look(0.98)}, {**SKEWED, 0: look(0.7, seconds=60.0)}])
def test_a_rank_that_is_gone_and_a_stopped_agent_begin_it_afresh(other: Mapping[int, Window]) -> None:
    state, _ = named(SKEWED, ENOUGH - 1)

    state, found = named(other, 1, state)

    assert found == named(SKEWED, 3, state)[1] == []
