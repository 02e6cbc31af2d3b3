"""agent.workers.orphans: how long what a successful job has left behind may go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elaunch.agent.workers.orphans import Idleness, Use

GRACE_S = 60.0


def ends_at_s(used_at: Callable[[float], dict[int, Use]], grace_s: float = GRACE_S) -> float:
    """When the wait is over, looking whenever it is due."""
    idleness = Idleness(grace_s, 0.0, used_at(0.0))
    while True:
        now_s = idleness.due_s
        if idleness.is_over(now_s, used_at(now_s)):
            return now_s


def test_what_does_nothing_has_the_grace() -> None:
    assert ends_at_s(lambda _: {1: Use(3.0, 10**9)}) == GRACE_S


@pytest.mark.parametrize("use", [lambda s: Use(0.1 * s), lambda s: Use(0.0, int(20_000 * s))], ids=["cpu", "bytes"])
def test_what_works_for_ten_minutes_ends_a_grace_later(use: Callable[[float], Use]) -> None:
    assert ends_at_s(lambda now_s: {1: use(min(now_s, 600.0))}) == 600.0 + GRACE_S


def test_a_process_that_was_not_there_before_counts_from_nothing() -> None:
    """As in a loop over files that starts a program for each."""
    assert ends_at_s(lambda now_s: {1: Use(), 100 + int(now_s): Use(2.0)} if now_s < 600 else {1: Use()}) >= 600.0


@pytest.mark.parametrize("use", [lambda s: Use(0.01 * s), lambda s: Use(0.0, int(1000 * s))], ids=["cpu", "bytes"])
def test_a_monitor_that_looks_now_and_then_is_idle(use: Callable[[float], Use]) -> None:
    assert ends_at_s(lambda now_s: {1: use(now_s)}) == GRACE_S


def test_what_always_works_ends_after_sixty_graces() -> None:
    assert ends_at_s(lambda now_s: {1: Use(now_s)}) == 60 * GRACE_S


def test_one_that_works_keeps_those_that_wait_for_it() -> None:
    assert ends_at_s(lambda now_s: {1: Use(), 2: Use(min(now_s, 600.0))}) == 600.0 + GRACE_S


def test_a_short_grace_is_looked_at_often_enough() -> None:
    assert ends_at_s(lambda _: {1: Use()}, 0.5) == 0.5
