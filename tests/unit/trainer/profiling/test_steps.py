"""profiling.steps: which steps are profiled."""

from __future__ import annotations

import pytest

from elaunch.trainer.profiling.steps import Before, StepCount, StepWindow, last_step_needed, parse_steps, plan


def test_a_number_is_a_count_and_a_range_names_its_first_and_last_step() -> None:
    assert parse_steps("3") == StepCount(3)
    assert parse_steps("10-12") == StepWindow(10, 12)
    assert parse_steps(" 7 - 7 ") == StepWindow(7, 7)
    assert (StepWindow(10, 12).count, str(StepWindow(10, 12)), str(StepWindow(7, 7))) == (3, "steps 10 to 12", "step 7")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "neither a number of steps nor a range"),
        ("ten", "give 3, or 10-12"),
        ("-3", "neither"),
        ("1-2-3", "neither"),
        ("٣", "neither"),
        ("0", "0 steps are none"),
        ("0-3", "begins with step 0; the first step is 1"),
        ("12-10", "ends before it begins; give 10-12"),
        ("1001", "1001 steps are more than the 1000"),
        ("1-5000", "5000 steps are more"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_steps(text)


def test_a_count_begins_after_two_steps_of_each_start() -> None:
    assert plan(StepCount(3), 1).window == StepWindow(3, 5)
    assert plan(StepCount(3), 21).window == StepWindow(23, 25)
    assert last_step_needed(StepCount(3)) == 5


def test_a_range_is_profiled_if_the_step_before_it_is_to_come() -> None:
    assert plan(StepWindow(10, 12), 1) == plan(StepWindow(10, 12), 9)
    assert plan(StepWindow(10, 12), 9).window == StepWindow(10, 12)
    assert plan(StepWindow(10, 12), 9).sentence == ""


@pytest.mark.parametrize(("next_step", "first"), [(10, 11), (12, 13), (400, 401)])
def test_a_start_after_that_profiles_as_many_steps_and_says_which(next_step: int, first: int) -> None:
    found = plan(StepWindow(10, 12), next_step)

    assert found.window == StepWindow(first, first + 2)
    assert f"steps {first} to {first + 2} are profiled instead of steps 10 to 12" in found.sentence


def test_a_restart_within_the_profiled_steps_profiles_again_and_says_why() -> None:
    for choice in (StepWindow(10, 12), StepCount(3)):
        found = plan(choice, 11, Before.BEGUN)

        assert found.window is not None
        assert found.window.first > 11
        assert found.window.count == 3
        assert "an earlier generation ended while steps were profiled, and left no trace" in found.sentence
    # It lost steps, and comes to them again.
    again = plan(StepWindow(10, 12), 4, Before.BEGUN)
    assert again.window == StepWindow(10, 12)
    assert "steps 10 to 12 are profiled again" in again.sentence


def test_what_is_profiled_once_is_not_profiled_again() -> None:
    assert plan(StepWindow(10, 12), 1, Before.DONE).window is None
    assert plan(StepCount(3), 30, Before.DONE).window is None
