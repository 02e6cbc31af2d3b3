"""What the search chooses, in simulated networks: the fastest, never worse than DDP's default, in few passes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.tuning import SearchResult, Size, found_in, keep, search, sentence_of, sizes, tune

PASSES_MAX = 75
GRADIENT_MB = 60


@dataclass
class World:
    """`cost_s(size, rank)` is a pass's true time. Each pass differs from it by `noise`, a share of it.

    Over 100 passes everything becomes slower by the share `drift`. A share of `spikes` passes take five times as long.
    """

    cost_s: Callable[[Size, int], float]
    ranks: int = 2
    noise: float = 0.02
    drift: float = 0.0
    spikes: float = 0.0
    seed: int = 0
    passes: list[Size] = field(default_factory=list)

    def true_s(self, size: Size) -> float:
        """What the slowest rank needs."""
        return max(self.cost_s(size, rank) for rank in range(self.ranks))

    def run(self, gradient_mb: float = GRADIENT_MB) -> SearchResult:
        """The whole search."""
        dice = random.Random(self.seed)

        def pass_s(size: Size) -> float:
            self.passes.append(size)
            assert len(self.passes) < 1000, "the search does not end"
            drifted = 1 + self.drift * len(self.passes) / 100
            spike = 5.0 if dice.random() < self.spikes else 1.0
            costs = [self.cost_s(size, rank) * dice.gauss(1, self.noise) for rank in range(self.ranks)]
            return max(0.1 * max(costs), max(costs)) * drifted * spike

        return search(gradient_mb, pass_s)


def by_size(times: dict[Size, float]) -> Callable[[Size, int], float]:
    return lambda size, rank: times.get(size, 1.0)


SEEDS = range(40)


def test_the_fastest_bucket_size_is_found() -> None:
    for seed in SEEDS:
        result = World(by_size({1: 0.9, 5: 0.6, 25: 1.0}), seed=seed).run()

        assert result.bucket_mb == 5, seed
        assert result.gain == pytest.approx(1 / 0.6, rel=0.1)


def test_among_equals_the_default_stays() -> None:
    for noise in (0.0, 0.01, 0.02):
        for seed in SEEDS:
            result = World(by_size({}), noise=noise, seed=seed).run()

            assert result.bucket_mb is None, (noise, seed)
            assert result.gain == 1.0
    # Of more noise than the least gain some survives, which costs nothing.
    loud = [World(by_size({}), noise=0.1, seed=seed).run().bucket_mb for seed in SEEDS]
    assert loud.count(None) >= 0.9 * len(SEEDS)


def test_the_choice_is_never_slower_than_the_default_by_more_than_the_noise() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        times = {size: dice.uniform(0.8, 2.0) for size in (None, 1.0, 5.0, 25.0, 61.0)}
        noise = dice.choice((0.0, 0.02, 0.1, 0.3))
        world = World(by_size(times), noise=noise, drift=dice.uniform(-0.4, 0.4), spikes=0.05, seed=seed)

        result = world.run()

        assert world.true_s(result.bucket_mb) <= world.true_s(None) * (1 + noise), (seed, noise, times, result)


def test_the_slowest_rank_decides() -> None:
    def cost_s(size: Size, rank: int) -> float:
        # Small buckets are good for all ranks but the last one, whose CPU is slow.
        return (2.0 if rank == 3 else 0.5) if size == 5 else 1.0

    assert World(cost_s, ranks=4).run().bucket_mb is None


def test_it_ends_within_the_passes_that_are_promised() -> None:
    for seed in SEEDS:
        dice = random.Random(seed)
        costs: dict[Size, float] = {}
        world = World(lambda size, rank: costs.setdefault(size, dice.uniform(0.3, 1.0)), seed=seed)  # noqa: B023

        assert world.run(1000).passes <= PASSES_MAX


def test_sizes_are_those_that_make_other_buckets() -> None:
    assert sizes(0.5) == []
    assert sizes(8.5) == [1, 5, 10]
    assert sizes(400) == [1, 5, 25, 100, 401]


RESULT = SearchResult(5.0, 0.472, 0.291, passes=43, spent_s=18.24, reason="it won")


def test_with_one_worker_nothing_is_tuned(group: None) -> None:
    logged: list[str] = []

    assert isinstance(tune(nn.Linear(1, 1), lambda _: None, log=logged.append), DistributedDataParallel)

    assert logged == ["nothing to tune: there is one worker"]


def test_a_model_that_measuring_would_change_is_refused(group: None) -> None:
    trains = nn.Linear(1, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, trains.parameters(), {"lr": 1.0})
    with pytest.raises(ValueError, match="optimizers run in the backward pass"):
        tune(trains, lambda _: None)


def test_the_sentence_has_the_gain_the_cost_and_the_place() -> None:
    assert sentence_of(RESULT, "stored in /c/f") == (
        "communication tuned in 43 passes (18.2 s): buckets of 5 MiB; a pass takes 291.0 ms, with DDP's default "
        "472.0 ms (1.62 times as fast); stored in /c/f"
    )
    same = SearchResult(None, 1.5, 1.5, passes=31, spent_s=50.0, reason="nothing was faster")
    assert sentence_of(same, "not stored: /c") == (
        "communication tuned in 31 passes (50.0 s): DDP's default buckets, nothing was faster; not stored: /c"
    )


def test_a_choice_is_found_for_its_number_of_workers_and_by_a_restart_for_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    assert found_in(file, 4) == (None, "")

    assert keep(file, RESULT, 4) == f"stored in {file}"

    assert found_in(file, 4)[0] == (5.0,)
    assert found_in(file, 2) == (None, "")
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    assert found_in(file, 2) == ((5.0,), "buckets of 5 MiB, as this run measured with 4 workers")


@pytest.mark.parametrize("size", [{}, [], "rm -rf", -5, 1e300])
def test_a_damaged_choice_is_named_and_measured_again(tmp_path: Path, size: Any) -> None:
    keep(tmp_path / "key", RESULT, 4)
    record = json.loads((tmp_path / "key").read_text())

    for text in (json.dumps({**record, "bucket_mb": size}), "", "[]", "[" * 100_000, '{"bucket_mb": 5}'):
        (tmp_path / "key").write_text(text)
        found, sentence = found_in(tmp_path / "key", 4)

        assert found is None
        assert "cannot be used" in sentence
