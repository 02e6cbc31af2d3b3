"""bench's sections about the training's state: each runs once with a small state, to see that it measures rightly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import statecost, staterestart
from bench.marks import FIRST_STEP, NEXT_STEP
from bench.sides import KEPT, usual


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


@pytest.mark.slow
def test_a_restart_of_the_usual_script_makes_steps_again() -> None:
    taken = list(staterestart.restarts(usual(1000), 1, limit_s=60, rng=random.Random(1)))

    (sample,) = taken
    assert not sample.why
    # There is nothing to load before step 1000.
    assert sample.values[staterestart.LOST] >= 5
    assert sample.stages["script's first line"] < sample.stages[FIRST_STEP] < sample.stages[NEXT_STEP]
    assert "noticed" not in sample.stages


@pytest.mark.slow
def test_every_way_of_copying_is_measured() -> None:
    taken = list(statecost.copies(2, 2))

    assert not [sample.why for sample in taken if sample.why]
    assert sorted({s.contender for s in taken}) == sorted([statecost.KEEPER, statecost.SAVE, statecost.DCP])
    assert len(taken) == 6
    for sample in taken:
        assert sample.values[statecost.HELD] > 0
        # Two copies of 2 MB, apart from bytes that do not belong to the state.
        assert sample.values[statecost.MEMORY] > 3.5
    assert all(sample.values[statecost.EVERY] >= 1 for sample in taken if sample.contender == statecost.KEEPER)


@pytest.mark.slow
def test_the_keeper_is_measured_beside_the_same_steps_without_it() -> None:
    (pair,) = statecost.pairs(2, 1)

    assert not pair.why
    assert pair.values[statecost.PLAIN] > 0
    assert pair.values[statecost.KEPT] > 0
    assert pair.values[statecost.KEPT_P95] > 0
