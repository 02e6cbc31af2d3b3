"""The verdict over pairs of turns of DDP, under elaunch and without a launcher."""

from __future__ import annotations

import random

import pytest

from bench.ddp_overhead import OVERHEAD_MAX, Pair, judge


def pairs(overhead: float, noise: float, count: int = 40) -> list[Pair]:
    """Turns on a machine whose speed wanders, and by more than the overhead."""
    rng = random.Random(1)
    speeds = [rng.uniform(0.03, 0.05) for _ in range(count)]
    return [Pair(speed * (1 + overhead) * rng.gauss(1, noise), speed, 0.0) for speed in speeds]


def test_a_slow_stretch_of_the_machine_does_not_show_in_the_pairs() -> None:
    verdict = judge(pairs(0.002, 0.0))

    assert verdict.overhead == pytest.approx(0.002)
    assert verdict.low == pytest.approx(0.002)
    assert verdict.holds


@pytest.mark.parametrize(("overhead", "holds"), [(0.0, True), (-0.01, True), (0.02, False)])
def test_the_bar_is_for_the_median_and_the_interval_has_it(overhead: float, holds: bool) -> None:
    verdict = judge(pairs(overhead, 0.005))

    assert verdict.holds == holds
    assert verdict.low <= verdict.overhead <= verdict.high
    assert verdict.low - 0.003 <= overhead <= verdict.high + 0.003
    assert verdict.pairs == 40
    assert (verdict.overhead <= OVERHEAD_MAX) == holds
