"""Order and seeded datasets under a real DataLoader with real workers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from elaunch.trainer.data.order import Order
from elaunch.trainer.data.sampling import Seeded, accumulate

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
FOUR = {"num_workers": 4, "prefetch_factor": 4, "persistent_workers": True}
FEW = [pytest.param({"num_workers": 0}, id="none"), pytest.param({"num_workers": 2}, id="two")]
WORKERS = [*FEW, pytest.param(FOUR, id="four", marks=pytest.mark.slow)]
ORDER = Order(50, seed=7, global_batch=12, micro_batch=2)


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def taken(loader: DataLoader[Any], count: int) -> list[list[int]]:
    """The first batches of one iterator, which is given up with what it has prefetched."""
    return [batch.tolist() for batch in itertools.islice(iter(loader), count)]


# Four processes that read ahead show it best.
@pytest.mark.parametrize("workers", WORKERS[1:])
def test_what_was_prefetched_when_a_run_was_cut_off_is_neither_lost_nor_repeated(workers: dict[str, Any]) -> None:
    trained: list[int] = []
    after = 0
    # Each part ends with batches in flight, one of them in the middle of a step, and the next has another world size.
    for world_size, steps, extra in ((3, 2, 1), (1, 1, 4), (2, 22, 0)):
        for rank in range(world_size):
            batches = ORDER.batches(rank, world_size, after=after)
            loader = DataLoader(Numbers(), batch_sampler=batches, **workers)
            done = steps * len(batches.micros)
            trained += [sample for batch in taken(loader, done + min(extra, 1))[:done] for sample in batch]
        after += steps

    assert after == 25
    assert {trained.count(sample) for sample in range(50)} == {25 * 12 // 50}


class Noisy(Numbers):
    """Samples with the three usual kinds of noise."""

    def __getitem__(self, index: int) -> Any:
        noise = [random.random(), numpy.random.random(), torch.rand(()).item()]
        return torch.tensor([index, *noise], dtype=torch.float64)


def noise_by_place(world_size: int, workers: dict[str, Any], after: int = 0) -> dict[tuple[int, int], list[Any]]:
    found = {}
    for rank in range(world_size):
        batches = ORDER.batches(rank, world_size, after=after, until=4)
        loader: DataLoader[Tensor] = DataLoader(Seeded(Noisy()), batch_sampler=batches, **workers)
        places = ((samples.step, samples.micro) for samples in batches)
        found.update(zip(places, (batch.tolist() for batch in loader), strict=True))
    return found


@pytest.mark.parametrize("workers", WORKERS)
def test_augmentation_is_the_same_at_any_world_size_and_after_a_restart(workers: dict[str, Any]) -> None:
    alone = noise_by_place(1, {"num_workers": 0})

    assert noise_by_place(3, workers) == alone
    assert noise_by_place(2, workers, after=2) == {place: alone[place] for place in alone if place[0] > 2}
    assert len({row[1] for batch in alone.values() for row in batch}) == 4 * 12


def test_what_a_model_draws_for_a_micro_batch_is_the_same_at_any_world_size() -> None:
    def drawn(world_size: int) -> dict[int, float]:
        parts = (accumulate(nn.Linear(1, 1), ORDER, 3, rank, world_size) for rank in range(world_size))
        return {micro.number: torch.rand(()).item() for part in parts for micro in part}

    alone = drawn(1)

    assert len(set(alone.values())) == 6
    assert drawn(3) == drawn(4) == alone


INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def test_ddp_exchanges_in_the_last_of_a_steps_micro_batches_alone(group: None) -> None:
    module, order = nn.Linear(4, 1), Order(12, global_batch=6, micro_batch=2)
    model = DistributedDataParallel(module)
    rows: list[Tensor] = []
    exchanged_after: list[int] = []

    # Annotated, the bucket must be of the class itself, and not of its name.
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        exchanged_after.append(len(rows))
        return allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    for micro in accumulate(model, order, 1):
        rows.append(INPUTS[[order.sample(position) for position in order.loaded(1, micro.number)]])
        (model(rows[-1]).square().mean() * micro.weight).backward()
    found = module.weight.grad

    module.weight.grad = None
    module(torch.cat(rows)).square().mean().backward()
    assert exchanged_after == [3]
    torch.testing.assert_close(found, module.weight.grad)
