"""The data order: a pure function of seed and step, shared out among any number of ranks."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections import Counter
from itertools import islice, pairwise

import pytest

from elaunch.trainer.data.order import Order, Tail, permuted
from tests.harness import RUN_LIMIT_S

SEEDS = range(40)


def random_order(dice: random.Random, tail: Tail | None = None) -> Order:
    micro_batch, many = dice.randint(1, 4), dice.randint(1, 6)
    batch = micro_batch * many
    tail = tail or dice.choice(("carry", "drop", "short"))
    return Order(
        dice.randint(batch, 4 * batch + 3) if tail == "drop" else dice.randint(1, 4 * batch + 3),
        seed=dice.randrange(1000),
        global_batch=batch,
        micro_batch=micro_batch,
        block=dice.choice((None, 1, dice.randint(2, 20))),
        tail=tail,
    )


def ids_of(order: Order, steps: range) -> list[int]:
    return [sample for step in steps for micro in order.microbatches(step) for sample in micro]


def epochs_of(order: Order, count: int) -> list[list[int]]:
    """The first `count` epochs as they are drawn, cut at the order's own epoch borders."""
    assert order.size is not None
    drawn = ids_of(order, range(1, order.steps(count) + 1))
    length = order.size // order.global_batch * order.global_batch if order.tail == "drop" else order.size
    return [drawn[epoch * length : (epoch + 1) * length] for epoch in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_every_index_has_its_own_place_in_a_permutation(count: int) -> None:
    drawn = [permuted(index, count, key=99) for index in range(count)]

    assert sorted(drawn) == list(range(count))


def test_a_permutation_mixes() -> None:
    drawn = [permuted(index, 1000, key=5) for index in range(1000)]

    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(drawn))
    assert neighbours < 20


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_comes_once_per_epoch(seed: int) -> None:
    order = random_order(random.Random(seed))
    assert order.size is not None

    for epoch in epochs_of(order, 3):
        if order.tail == "drop":
            assert len(set(epoch)) == len(epoch) == order.size // order.global_batch * order.global_batch
        else:
            assert sorted(epoch) == list(range(order.size)), order


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("tail", ["carry", "short"])
def test_no_size_is_too_odd_for_an_epoch(size: int, tail: Tail) -> None:
    order = Order(size, global_batch=6, micro_batch=2, tail=tail)

    assert all(sorted(epoch) == list(range(size)) for epoch in epochs_of(order, 4))


def test_the_next_epoch_has_another_order() -> None:
    order = Order(60, seed=3, global_batch=60, micro_batch=60)

    assert order.microbatches(1) != order.microbatches(2)


def test_with_drop_another_rest_is_left_out_of_each_epoch() -> None:
    order = Order(65, global_batch=20, micro_batch=5, tail="drop")

    left_out = [frozenset(range(65)) - set(epoch) for epoch in epochs_of(order, 8)]

    assert all(len(rest) == 5 for rest in left_out)
    assert len(set(left_out)) == 8


def test_a_step_depends_on_seed_and_step_alone() -> None:
    order = Order(1000, seed=3, global_batch=6, micro_batch=6)
    (at_once,) = order.microbatches(40)
    ids_of(order, range(1, 41))

    assert order.microbatches(40) == [at_once]
    assert Order(1000, seed=4, global_batch=6, micro_batch=6).microbatches(40) != [at_once]
    # The order is part of what a run directory holds: no release may change it unnoticed.
    assert at_once == [202, 770, 164, 522, 874, 12]


def test_no_later_release_changes_keys_or_shuffled_blocks_unnoticed() -> None:
    order = Order(None, seed=3, global_batch=6, micro_batch=3, block=8)

    assert order.microbatches(3) == [[15, 12, 8], [14, 20, 18]]
    assert order.key(7, 1) == 5170915102551302053


def test_how_a_step_is_cut_into_micro_batches_does_not_change_it() -> None:
    whole = Order(1000, seed=3, global_batch=12, micro_batch=12)
    cut = Order(1000, seed=3, global_batch=12, micro_batch=2)

    assert ids_of(whole, range(5, 9)) == ids_of(cut, range(5, 9))


def test_a_dataset_smaller_than_a_batch_is_read_several_times_in_a_step() -> None:
    assert sorted(ids_of(Order(2, global_batch=6, micro_batch=6), range(1, 2))) == [0, 0, 0, 1, 1, 1]


def test_a_terabyte_of_samples_costs_no_memory_and_no_time() -> None:
    order = Order(10**12, global_batch=1024, micro_batch=256)

    ids = ids_of(order, range(10**11, 10**11 + 1))

    assert len(set(ids)) == 1024
    assert len(pickle.dumps(order)) < 500


@pytest.mark.parametrize("many", range(1, 13))
@pytest.mark.parametrize("world_size", range(1, 13))
def test_shares_are_contiguous_and_differ_by_at_most_one(many: int, world_size: int) -> None:
    order = Order(100, global_batch=many, micro_batch=1)
    if world_size > many:
        with pytest.raises(
            ValueError, match=rf"{world_size} workers are more than the {many} micro-batches .*use at most"
        ):
            order.share(0, world_size)
        return

    shares = [order.share(rank, world_size) for rank in range(world_size)]

    assert [micro for share in shares for micro in share] == list(range(many))
    assert {len(share) for share in shares} <= {many // world_size, -(-many // world_size)}


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
    order = random_order(dice, dice.choice(("carry", "short")))
    gradient = {sample: dice.uniform(-1, 1) for sample in range(order.size or 0)}

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


def test_a_weight_that_differs_is_not_told_as_one_number() -> None:
    assert Order(100, global_batch=24, micro_batch=3).weight(3) == 3 / 8

    with pytest.raises(ValueError, match="micro-batches differ in weight; say which one"):
        Order(100, global_batch=24, micro_batch=3, tail="short").weight(3)


def test_a_short_last_step_is_spread_over_its_micro_batches() -> None:
    order = Order(17, global_batch=12, micro_batch=3, tail="short")

    assert [len(micro) for micro in order.microbatches(1)] == [3, 3, 3, 3]
    assert [len(micro) for micro in order.microbatches(2)] == [1, 1, 1, 2]
    assert (order.steps(3), order.epoch(4), order.epoch(5)) == (6, 1, 2)


def test_a_rank_without_samples_computes_something_at_weight_0() -> None:
    order = Order(13, global_batch=12, micro_batch=3, tail="short")

    parts = [order.parts(2, rank, 4)[0] for rank in range(4)]
    loaded = [next(iter(order.batches(rank, 4, after=1))) for rank in range(4)]

    assert [len(part.samples) for part in parts] == [0, 0, 0, 1]
    assert [part.weight for part in parts] == [0, 0, 0, 4]
    assert loaded == [list(parts[3].samples)] * 4


def test_only_a_ranks_last_micro_batch_is_last() -> None:
    order = Order(100, global_batch=8, micro_batch=1)

    assert [[part.is_last for part in order.parts(1, rank, 3)] for rank in range(3)] == [
        [False, True],
        [False, False, True],
        [False, False, True],
    ]


@pytest.mark.parametrize("tail", ["carry", "short"])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_even_ranks_run_as_many_forward_passes_and_change_nothing_else(world_size: int, tail: Tail) -> None:
    plain = Order(50, seed=1, global_batch=24, micro_batch=3, tail=tail)
    even = Order(50, seed=1, global_batch=24, micro_batch=3, tail=tail, even=True)

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


def test_keys_differ_by_seed_step_and_micro_batch_and_by_nothing_else() -> None:
    orders = [Order(100, seed=seed, global_batch=8, micro_batch=2) for seed in (0, 1)]

    keys = [order.key(step, micro) for order in orders for step in range(1, 50) for micro in range(4)]

    assert len(set(keys)) == len(keys)
    assert {part.key for rank in range(3) for part in orders[0].parts(9, rank, 3)} == {
        orders[0].key(9, micro) for micro in range(4)
    }


def test_a_stream_goes_on_for_ever_in_its_own_order() -> None:
    order = Order(None, shuffle=False, global_batch=6, micro_batch=2)

    assert order.microbatches(10**9 + 1) == [[6 * 10**9 + i, 6 * 10**9 + i + 1] for i in (0, 2, 4)]


@pytest.mark.parametrize("size", [None, 100])
def test_a_block_is_shuffled_in_itself(size: int | None) -> None:
    order = Order(size, global_batch=5, micro_batch=5, block=20)
    drawn = ids_of(order, range(1, 21))

    for number in range(5):
        block = drawn[number * 20 : (number + 1) * 20]
        assert sorted(block) == list(range(number * 20, (number + 1) * 20))
        assert block != sorted(block)


def test_batches_begin_behind_the_step_that_is_complete_and_end_where_asked() -> None:
    order = Order(100, global_batch=8, micro_batch=2)

    batches = order.batches(1, 3, after=4, until=6)

    assert len(batches) == 2
    assert list(batches) == [order.microbatches(5)[1], order.microbatches(6)[1]]
    assert [(batch.step, batch.micro, batch.key) for batch in batches] == [(s, 1, order.key(s, 1)) for s in (5, 6)]
    assert list(batches) == list(batches)
    assert list(order.batches(1, 3, after=6, until=6)) == []


def test_batches_without_an_end_have_no_length() -> None:
    batches = Order(3, global_batch=2, micro_batch=1).batches(0, 1)

    assert Counter(sample for batch in islice(batches, 30) for sample in batch) == {0: 10, 1: 10, 2: 10}
    with pytest.raises(TypeError, match="give batches\\(\\) the last step"):
        len(batches)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"global_batch": 24, "micro_batch": 5}, r"\(24\) is not a multiple of micro_batch \(5\); use micro_batch 4 "),
        ({"size": 0}, r"size \(0\) must be at least 1"),
        ({"micro_batch": 0}, r"micro_batch \(0\) must be at least 1"),
        ({"block": 0}, r"block \(0\) must be at least 1"),
        ({"size": None}, "a stream without a size cannot be shuffled as a whole; give block=N, or shuffle=False"),
        ({"size": None, "block": 3, "tail": "drop"}, 'no tail to treat as "drop"; give its size'),
        ({"tail": "loop"}, "tail .* must be"),
        ({"shuffle": False, "block": 3}, "leave one out"),
        ({"size": 5, "tail": "drop"}, "a size of 5 has no step of 24 samples"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_sentence_with_its_values(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Order(**{"size": 100, "global_batch": 24, "micro_batch": 3, **wrong})  # type: ignore[arg-type]


def test_steps_and_micro_batches_that_do_not_exist_are_refused() -> None:
    order = Order(100, global_batch=24, micro_batch=3)

    for wrong in (lambda: order.microbatches(0), lambda: order.samples(1, 8), lambda: order.share(3, 3)):
        with pytest.raises(ValueError, match="count from"):
            wrong()
    with pytest.raises(ValueError, match="a stream without a size has no epochs"):
        Order(None, shuffle=False, global_batch=1, micro_batch=1).steps(1)


def test_order_and_ledger_cost_no_import_of_torch() -> None:
    code = "import sys; from elaunch.trainer import Ledger, Order, link; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=RUN_LIMIT_S).returncode == 0
