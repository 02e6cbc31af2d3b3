"""After which steps the ranks look: how far apart, and where in any case."""

from __future__ import annotations

import pytest

from elaunch.trainer.keeper.sync_schedule import Looks


def run(looks: Looks, durations_s: list[float], first: int = 0) -> list[int]:
    """The steps of the looks, if this rank is alone or all ranks want the same."""
    now_s, found = 100.0, []
    looks.leave(first, now_s)
    for step, took_s in enumerate([0.0, *durations_s], first):
        now_s += took_s
        if looks.reached(step, now_s):
            found.append(step)
            looks.agreed(step, looks.wanted(step))
            looks.leave(step, now_s)
    return found


def test_looks_begin_at_each_step_and_grow_apart_to_the_limit() -> None:
    assert run(Looks(0), [0.01] * 100) == [0, 1, 3, 7, 15, 31, 63]


def test_a_slow_step_counts_until_the_look_after_the_next() -> None:
    # Step 20 takes a second: a checkpoint, an evaluation.
    durations_s = [0.01] * 60
    durations_s[19] = 1.0

    assert run(Looks(0), durations_s) == [0, 1, 3, 7, 15, 31, 32, 33, 35, 39, 47]


def test_a_pause_before_the_loop_is_no_step() -> None:
    looks = Looks(5)
    looks.leave(5, 0.0)
    assert looks.reached(5, 0.0)
    looks.agreed(5, looks.wanted(5))

    looks.leave(5, 1000.0)
    looks.reached(6, 1000.01)

    assert looks.step_s == pytest.approx(0.01)


def test_what_is_due_and_each_multiple_has_a_look() -> None:
    looks = Looks(0, [100, 30])
    found = run(looks, [0.001] * 95)

    assert {30, 60, 90} <= set(found)
    assert looks.wanted(95) == 5
    assert looks.wanted(95, [98]) == 3
    # It should have been before: not later than at the next step.
    assert looks.wanted(95, [90]) == 1
