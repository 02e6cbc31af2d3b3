"""profiling.steps: which steps are profiled, and the table."""

from __future__ import annotations

import pytest

from elaunch.trainer.profiling.traces import (
    StepWindow,
    last_step_needed,
    parse_steps,
    record,
    table,
    window_of,
)
from elaunch.trainer.profiling.traces import StepTimes


def test_a_number_is_a_count_and_two_are_a_range() -> None:
    assert parse_steps("3") == 3
    assert parse_steps(" 10-12 ") == StepWindow(10, 12)
    assert last_step_needed(parse_steps("3")) == 5
    assert last_step_needed(parse_steps("10-12")) == 12


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", "neither a number of steps nor a range"),
        ("1-3", "begin with 2"),
        ("0", "is 0 steps"),
        ("5-4", "is 0 steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_steps(text)


def test_a_start_profiles_what_is_left_of_a_range_after_a_step_of_warm_up_and_a_count_when_it_is_warm() -> None:
    assert window_of(StepWindow(10, 12), 1) == window_of(StepWindow(10, 12), 9) == StepWindow(10, 12)
    assert window_of(StepWindow(10, 12), 11) == StepWindow(12, 12)
    assert window_of(StepWindow(10, 12), 12) is None
    assert window_of(3, 8) == StepWindow(10, 12)


def test_the_table_has_a_steps_mean_on_each_rank_and_names_the_one_that_the_others_waited_for() -> None:
    # Rank 1 computes longer, and so waits for nobody.
    times = [StepTimes(rank, step, 0.1, *own) for step in (10, 11) for rank, own in enumerate(
        [(0.04, 0.05, 0.04), (0.08, 0.012, 0.01), (0.04, 0.05, 0.04)]
    )]  # fmt: skip

    lines = table(times)

    assert lines[0] == "steps 10 to 11 took 100.00 ms each; computation covered 20% of the communication"
    assert lines[1:5] == [
        "rank       step  computes  communicates   exposed",
        "   0  100.00 ms  40.00 ms      50.00 ms  40.00 ms",
        "   1  100.00 ms  80.00 ms      12.00 ms  10.00 ms",
        "   2  100.00 ms  40.00 ms      50.00 ms  40.00 ms",
    ]
    assert lines[5:] == ["rank 1 kept the others waiting, for 30.00 ms of each step"]
    assert len(table(times[:1])) == 3
    made = record(times, lines, generation=2, on_gpu=True)
    assert (made["first_step"], made["last_step"], made["step_s"]) == (10, 11, pytest.approx(0.1))
    assert made["gpu_busy"] == pytest.approx(1.6 / 3)
    assert record([], [], generation=0, on_gpu=False)["step_s"] is None
