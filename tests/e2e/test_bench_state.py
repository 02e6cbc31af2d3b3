"""bench's sections about the training's state: each runs once with a small state, to see that it measures rightly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import staterestart
from bench.marks import FIRST_STEP, NEXT_STEP
from bench.sides import KEPT


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(Path("/dev/shm").glob("bench_*"))
    yield
    assert set(Path("/dev/shm").glob("bench_*")) <= before


@pytest.mark.slow
def test_a_restart_with_the_keeper_loses_nothing_and_has_all_stages() -> None:
    first, second = staterestart.restarts(KEPT, 2, limit_s=60, rng=random.Random(1))

    for sample in (first, second):
        assert not sample.why
        assert sample.values[staterestart.LOST] == 0
        assert sample.stages["noticed"] < sample.stages["all killed"] < sample.stages["state restored"]
        # The first step is the next one.
        assert sample.stages[FIRST_STEP] == sample.stages[NEXT_STEP] == pytest.approx(sample.values[NEXT_STEP])
