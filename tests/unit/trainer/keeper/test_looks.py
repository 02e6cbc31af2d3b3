"""After which steps the ranks look: how far apart, and where in any case."""

from __future__ import annotations

import pytest

from elaunch.trainer.keeper.sync_schedule import WITHIN_S, Looks


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
    assert run(Looks(None, 0), [0.01] * 100) == [0, 1, 3, 7, 15, 31, 55, 79]


def test_steps_that_take_longer_than_the_limit_have_a_look_each() -> None:
    assert run(Looks(None, 7), [WITHIN_S * 1.1] * 5, first=7) == [7, 8, 9, 10, 11, 12]


def test_a_slow_step_counts_until_the_look_after_the_next() -> None:
    # Step 20 takes a second: a checkpoint, an evaluation.
    durations_s = [0.01] * 60
    durations_s[19] = 1.0

    assert run(Looks(None, 0), durations_s) == [0, 1, 3, 7, 15, 31, 32, 33, 35, 39, 47]


def test_stutters_count_as_often_as_they_come() -> None:
    # Every tenth step takes ten times as long: a mean of 19 ms, and one more of the slow ones may come.
    durations_s = [0.1 if step % 10 == 9 else 0.01 for step in range(200)]

    found = run(Looks(None, 0), durations_s)

    assert 8 <= found[-1] - found[-2] <= 12


def test_a_pause_before_the_loop_is_no_step() -> None:
    looks = Looks(None, 5)
    looks.leave(5, 0.0)
    assert looks.reached(5, 0.0)
    looks.agreed(5, looks.wanted(5))

    looks.leave(5, 1000.0)
    looks.reached(6, 1000.01)

    assert looks.step_s == pytest.approx(0.01)


def test_what_is_due_and_each_multiple_has_a_look() -> None:
    looks = Looks(None, 0, [100, 30])
    found = run(looks, [0.001] * 95)

    assert {30, 60, 90} <= set(found)
    assert looks.wanted(95) == 5
    assert looks.wanted(95, [98]) == 3
    # It should have been before: not later than at the next step.
    assert looks.wanted(95, [90]) == 1


@pytest.mark.parametrize(("first", "found"), [(0, [0, 4, 8]), (3, [4, 8]), (4, [4, 8])])
def test_a_fixed_distance_means_its_multiples_alone(first: int, found: list[int]) -> None:
    assert run(Looks(4, first, [3]), [5.0] * (10 - first), first) == found


def test_a_loop_that_passes_an_agreed_step_looks_at_its_next_boundary() -> None:
    looks = Looks(4, 0)
    looks.agreed(0, 4)

    assert not looks.reached(3, 1.0)
    assert looks.reached(6, 2.0)
    assert looks.wanted(6) == 2
