"""agent.core.slow_ranks: which rank the others wait for, and what is different about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from elaunch.agent.core.slow_ranks import WINDOW_S, WINDOWS, Slow, SlowRanks, Traits, slow_words
from elaunch.agent.core.standstill import Window

LOOK_S = 5.0
USUAL = Traits(cpus=8, nice=0, delayed=0.02, throttled=0.0, children=0.6, major_faults=0.0, clock_mhz=1980)
SLOW = Slow(3, wait_share=0.3, lasted_s=120.0)


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


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"cpus": 1}, "it may use 1 CPU, and they 8 CPUs"),
        ({"nice": 10}, "its nice value is 10, and theirs 0"),
        ({"delayed": 0.4}, "has to wait for 40% of that time, and they for 2%: other processes use its CPUs"),
        ({"throttled": 0.3}, "its cgroup's limit (cpu.max) holds it back for 30% of the time"),
        ({"major_faults": 120.0}, "it reads 120 pages a second from a disk (swap, or mapped files)"),
        ({"children": 1.8}, "its data loaders use 1.8 CPUs, and theirs 0.6"),
        (
            {"clock_mhz": 1200, "limited_by": "its temperature"},
            "its GPU runs at 1200 MHz, and theirs at 1980 MHz, limited by its temperature",
        ),
        ({}, "so it may have more work"),
    ],
)
def test_what_is_different_about_a_slow_rank_is_said(own: dict[str, float], words: str) -> None:
    said = slow_words(11, SLOW, replace(USUAL, **own), [USUAL, USUAL])  # type: ignore[arg-type]

    assert said.startswith(
        "rank 11 is slower than the other ranks of this node: they wait for 30% of the time, for the"
    )
    assert words in said
    assert said.count(" and they") + said.count("its ") <= 4, "nothing else is said to differ"


def test_without_the_facts_only_what_was_seen_is_said() -> None:
    assert slow_words(11, SLOW, None, [USUAL]).endswith("for the last 120 s")
