"""`Batches`: an ordinary DataLoader comes back at the right sample."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from elaunch.trainer.data.batches import Batches
from tests.harness import slow

SIZE = 22


class Numbers(Dataset[torch.Tensor]):
    """The numbers below SIZE; `read` has those that were loaded."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor(index)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def distributed() -> DataLoader[Any]:
    dataset = Numbers()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=True, seed=3)
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def with_generator() -> DataLoader[Any]:
    return shuffled(generator=torch.Generator().manual_seed(8))


def with_the_samplers_generator() -> DataLoader[Any]:
    dataset = Numbers()
    return DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset, generator=torch.Generator().manual_seed(8)))


def single_samples() -> DataLoader[Any]:
    dataset = Numbers()
    return DataLoader(dataset, batch_size=None, sampler=RandomSampler(dataset))


LOADERS: list[Callable[[], DataLoader[Any]]] = [
    shuffled,
    distributed,
    with_generator,
    with_the_samplers_generator,
    single_samples,
    lambda: DataLoader(Endless(), batch_size=4),
]
WITH_WORKERS: list[Callable[[], DataLoader[Any]]] = [
    lambda: shuffled(num_workers=1),
    lambda: shuffled(num_workers=1, persistent_workers=True),
]
BEFORE = [0, 1, 3, 5, 6, 11, 13, 22, 23]
# Each loader's worker is a process. Within the first epoch, at its end, and in a later one.
QUICK_BEFORE = (3, 6, 22)


def taken(batches: Batches, count: int) -> list[list[int]]:
    """Batches, between which the training draws random numbers too."""
    return [torch.cat([batch.reshape(-1), torch.rand(1)]).tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize(
    ("make", "before"),
    [
        *itertools.product(LOADERS, BEFORE),
        *itertools.product(WITH_WORKERS, QUICK_BEFORE),
        *(slow(make, before) for make in WITH_WORKERS for before in BEFORE if before not in QUICK_BEFORE),
    ],
)
def test_a_new_process_goes_on_with_the_next_batch(make: Callable[[], DataLoader[Any]], before: int) -> None:
    torch.manual_seed(5)
    first = Batches(make())
    taken(first, before)
    state, random = copy.deepcopy(first.state_dict()), torch.get_rng_state()
    expected = taken(first, 9)

    torch.manual_seed(77)
    second = Batches(make())
    second.load_state_dict(state)
    torch.set_rng_state(random)

    assert taken(second, 9) == expected


def test_each_epoch_has_each_sample_once_in_another_order() -> None:
    batches = Batches(shuffled())

    epochs = [[int(one) for batch in itertools.islice(batches, 6) for one in batch] for _ in range(2)]

    assert [sorted(epoch) for epoch in epochs] == [[*range(SIZE)]] * 2
    assert epochs[0] != epochs[1]
    assert batches.epoch == 1


def test_what_is_done_is_not_loaded_again() -> None:
    first = Batches(shuffled())
    taken(first, 3)
    loader = shuffled()
    second = Batches(loader)
    second.load_state_dict(first.state_dict())

    next(second)

    assert isinstance(loader.dataset, Numbers)
    assert len(loader.dataset.read) == 4


def test_a_loader_without_a_batch_is_named() -> None:
    with pytest.raises(RuntimeError, match="the DataLoader has no batch"):
        next(Batches(DataLoader(Numbers(), batch_size=50, drop_last=True)))
