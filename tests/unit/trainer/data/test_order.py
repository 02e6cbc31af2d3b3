"""The data order: a pure function of seed and step, shared out among any number of ranks."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from elaunch.trainer.data.order import Order
from tests.harness import RUN_LIMIT_S

SEEDS = range(16)


def random_order(dice: random.Random) -> Order:
    micro_batch = dice.randint(1, 4)
    batch = micro_batch * dice.randint(1, 6)
    return Order(dice.randint(1, 4 * batch + 3), seed=dice.randrange(1000), global_batch=batch, micro_batch=micro_batch)


def ids_of(order: Order, steps: range) -> list[int]:
    return [sample for step in steps for micro in order.microbatches(step) for sample in micro]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_comes_once_per_epoch(seed: int) -> None:
    order = random_order(random.Random(seed))

    drawn = ids_of(order, range(1, order.steps(3) + 1))
    for epoch in range(3):
        assert sorted(drawn[epoch * order.size : (epoch + 1) * order.size]) == list(range(order.size)), order


def test_no_later_release_changes_keys_or_orders_unnoticed() -> None:
    order = Order(30, seed=3, global_batch=6, micro_batch=3)

    assert order.microbatches(3) == [[9, 13, 24], [21, 22, 23]]
    assert order.key(7, 1) == 5170915102551302053


@pytest.mark.parametrize("many", range(1, 13))
def test_shares_are_contiguous_and_differ_by_at_most_one(many: int) -> None:
    order = Order(100, global_batch=many, micro_batch=1)
    for world_size in range(1, many + 1):
        shares = [order.share(rank, world_size) for rank in range(world_size)]

        assert [micro for share in shares for micro in share] == list(range(many))
        assert {len(share) for share in shares} <= {many // world_size, -(-many // world_size)}

    with pytest.raises(ValueError, match=rf"{many + 1} workers are more than the {many} micro-batches .*use at most"):
        order.share(0, many + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_resizes_after_any_step_neither_lose_nor_repeat_a_sample(seed: int) -> None:
    dice = random.Random(seed)
    order = random_order(dice)
    last = order.steps(3)
    trained: list[tuple[int, int, tuple[int, ...]]] = []

    for step in range(1, last + 1):
        world_size = dice.randint(1, order.micro_batches)
        for rank in dice.sample(range(world_size), world_size):
            trained += [(step, part.number, part.samples) for part in order.parts(step, rank, world_size)]

    alone = [(step, part.number, part.samples) for step in range(1, last + 1) for part in order.parts(step, 0, 1)]
    assert sorted(trained) == alone
    assert [list(samples) for _, _, samples in alone] == [m for s in range(1, last + 1) for m in order.microbatches(s)]


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_make_the_mean_over_ranks_the_mean_over_samples(seed: int) -> None:
    dice = random.Random(seed)
    order = random_order(dice)
    gradient = {sample: dice.uniform(-1, 1) for sample in range(order.size)}

    for step in range(1, order.steps(2) + 1):
        ids = ids_of(order, range(step, step + 1))
        wanted = sum(gradient[sample] for sample in ids) / len(ids)
        for world_size in range(1, order.micro_batches + 1):
            sums = [
                sum(
                    part.weight * sum(gradient[sample] for sample in part.samples) / len(part.samples)
                    for part in order.parts(step, rank, world_size)
                    if part.samples
                )
                for rank in range(world_size)
            ]
            assert sum(sums) / world_size == pytest.approx(wanted, rel=1e-12), (order, step, world_size)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_even_ranks_run_as_many_forward_passes_and_change_nothing_else(world_size: int) -> None:
    plain = Order(50, seed=1, global_batch=24, micro_batch=3)
    even = Order(50, seed=1, global_batch=24, micro_batch=3, even=True)

    for step in (1, 3):
        passes = []
        for rank in range(world_size):
            parts = even.parts(step, rank, world_size)
            passes.append(len(parts))
            assert [part.number for part in parts if part.number >= 0] == list(plain.share(rank, world_size))
            assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
            assert {(part.weight, part.samples) for part in parts if part.number < 0} <= {(0.0, ())}
            loaded = list(even.batches(rank, world_size, after=step - 1, until=step))
            assert [batch.micro for batch in loaded] == [part.number for part in parts]
            assert all(loaded)
        assert passes == [-(-8 // world_size)] * world_size


def test_batches_begin_behind_the_step_that_is_complete_and_end_with_until() -> None:
    order = Order(100, global_batch=8, micro_batch=2)

    batches = order.batches(1, 3, after=4, until=6)

    assert len(batches) == 2
    assert list(batches) == [order.microbatches(5)[1], order.microbatches(6)[1]]
    assert [(batch.step, batch.micro, batch.key) for batch in batches] == [(s, 1, order.key(s, 1)) for s in (5, 6)]
    assert list(batches) == list(batches)
    assert list(order.batches(1, 3, after=6, until=6)) == []


@pytest.mark.parametrize(
    "imported", ["from elaunch.trainer import Ledger, Order, link", "import elaunch.trainer.__main__"]
)
def test_order_ledger_and_the_check_of_the_request_cost_no_import_of_torch(imported: str) -> None:
    code = f"import sys; {imported}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=RUN_LIMIT_S).returncode == 0
