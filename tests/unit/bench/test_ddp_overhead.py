"""The verdict over turns of DDP, under elaunch and without a launcher."""

from __future__ import annotations

import random

import pytest

from bench.ddp_overhead import OVERHEAD_MAX, Pair, Turn, judge


def launches(overhead: float, noise: float, count: int = 20, pairs: int = 5) -> list[list[float]]:
    """Ratios of turns; each launch has a ratio of its own, that wanders by `noise`."""
    rng = random.Random(1)
    own = [rng.gauss(1 + overhead, noise) for _ in range(count)]
    return [[each * rng.gauss(1, noise / 10) for _ in range(pairs)] for each in own]


def test_a_slow_stretch_of_the_machine_does_not_show_in_a_pair() -> None:
    pair = Pair(Turn(0.0505, 0.101), Turn(0.05, 0.1), 0.0)

    assert (pair.ratio, pair.cpu_ratio) == (pytest.approx(1.01), pytest.approx(1.01))


@pytest.mark.parametrize(("overhead", "holds"), [(0.0, True), (-0.01, True), (0.02, False)])
def test_the_bar_is_for_the_median_and_the_interval_has_it(overhead: float, holds: bool) -> None:
    verdict = judge(launches(overhead, 0.005))

    assert verdict.holds == holds
    assert verdict.low <= verdict.overhead <= verdict.high
    assert verdict.low - 0.003 <= overhead <= verdict.high + 0.003
    assert verdict.pairs == 100
    assert (verdict.overhead <= OVERHEAD_MAX) == holds


def test_more_turns_of_the_same_launches_do_not_pretend_to_know_more() -> None:
    few, many = judge(launches(0.0, 0.005, pairs=5)), judge(launches(0.0, 0.005, pairs=50))

    assert many.high - many.low > 0.7 * (few.high - few.low)
