"""profiling.clocks: how far clocks are apart."""

from __future__ import annotations

import random

from elaunch.trainer.profiling.clocks import ClockOffset, ClockReading, clock_offsets


def one_round(start: int, ahead: int, there: int, back: int, thinks: int = 10) -> list[ClockReading]:
    """A word takes `there` to the other clock, which is `ahead`, and the answer takes `back`."""
    got = start + there
    return [
        ClockReading(start, got + thinks + back),
        ClockReading(got + ahead, got + thinks + ahead),
    ]


def test_ranks_of_one_clock_are_not_apart() -> None:
    assert clock_offsets(["a", "a"], []) == [ClockOffset(), ClockOffset()]
    assert clock_offsets(["a", "a"], [one_round(0, 5_000, 10, 10)])[1] == ClockOffset()


def test_a_clock_is_known_to_half_of_the_way_there_and_back() -> None:
    found = clock_offsets(["a", "b"], [one_round(1_000, 5_000, 100, 100)])[1]

    assert found == ClockOffset(5_000, 100)
    # A way back that takes longer shifts it by less than the error that is told.
    askew = clock_offsets(["a", "b"], [one_round(1_000, 5_000, 100, 900)])[1]
    assert askew == ClockOffset(4_600, 500)


def test_the_truth_is_within_the_error_and_more_rounds_make_it_smaller() -> None:
    draw = random.Random(7)
    for _ in range(200):
        ahead = draw.randrange(-(10**9), 10**9)
        rounds = [one_round(k * 10**6, ahead, draw.randrange(1, 10**5), draw.randrange(1, 10**5)) for k in range(8)]

        found = clock_offsets(["a", "b"], rounds)[1]
        first = clock_offsets(["a", "b"], rounds[:1])[1]

        assert abs(found.ahead_ns - ahead) <= found.error_ns
        assert found.error_ns <= first.error_ns


def test_of_rounds_that_contradict_each_other_the_narrowest_counts() -> None:
    # The clock was set back by a second between the two.
    rounds = [one_round(0, 2_000_000_000, 500, 500), one_round(10_000, 1_000_000_000, 20, 20)]

    assert clock_offsets(["a", "b"], rounds)[1] == ClockOffset(1_000_000_000, 20)
