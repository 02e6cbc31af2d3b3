"""How much of a network is measured before plans are estimated."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from elaunch.trainer.parallel.checks import Shape
from elaunch.trainer.parallel.estimate import WorkerSpeed, estimate
from elaunch.trainer.parallel.plan import Sizes, fit, parse
from elaunch.trainer.parallel.speed import blocks_to_measure

SHAPE = Shape(layers=8, heads=4, width=64, context=32, global_batch=32, micro_batch=2)


@pytest.mark.parametrize(("workers", "layers", "blocks"), [(2, 6, 3), (2, 7, 3), (4, 6, 1), (8, 6, 1), (2, 100, 4)])
def test_the_blocks_are_those_of_a_worker_where_all_share_the_layers(workers: int, layers: int, blocks: int) -> None:
    assert blocks_to_measure(replace(SHAPE, layers=layers), workers, 2, sys.maxsize) == blocks


def test_they_are_fewer_where_memory_does_not_suffice_and_at_least_one() -> None:
    def step(blocks: int) -> int:
        plan = parse("pp=2")
        return estimate(plan, Sizes(pp=2), replace(SHAPE, layers=2 * blocks), WorkerSpeed()).memory.step

    assert blocks_to_measure(SHAPE, 2, 2, step(3)) == 3
    assert blocks_to_measure(SHAPE, 2, 2, step(3) - 1) == 2
    assert blocks_to_measure(SHAPE, 2, 2, 0) == 1


@pytest.mark.parametrize("text", ["pp=2", "fsdp2", "tp=2", "zero1", "ddp"])
def test_measuring_takes_no_more_than_any_plan_that_fits(text: str) -> None:
    plan = parse(text)
    room = estimate(plan, fit(plan, 2), SHAPE, WorkerSpeed()).memory.step

    blocks = blocks_to_measure(SHAPE, 2, 2, room)

    assert estimate(parse("pp=2"), Sizes(pp=2), replace(SHAPE, layers=2 * blocks), WorkerSpeed()).memory.step <= room
