"""agent.workers.link: the time of a step, from looks once a second."""

from __future__ import annotations

import pytest

from elaunch.agent.workers.link import StepTimes


def looks(steps: list[int]) -> StepTimes:
    """One look a second; each step that moved was reported."""
    times, reports, before = StepTimes(), 0, -1
    for second, step in enumerate(steps):
        reports += step != before
        before = step
        times.look(100.0 + second, step, reports)
    return times


def test_quick_steps_count_over_the_last_ten_seconds() -> None:
    # A slow start, then 5 steps a second.
    slow, quick = [0] * 30, [5 * second for second in range(1, 20)]

    assert looks(slow + quick).step_s == pytest.approx(0.2)


def test_slow_steps_count_over_the_looks_at_which_they_moved() -> None:
    assert looks([step for step in range(6) for _ in range(30)]).step_s == pytest.approx(30.0)


def test_a_worker_that_says_what_it_does_between_steps_has_reported() -> None:
    times = looks([1, 2])

    times.look(150.0, 2, 3)

    assert times.reported_s == 150.0
    assert times.step_s == pytest.approx(1.0)
