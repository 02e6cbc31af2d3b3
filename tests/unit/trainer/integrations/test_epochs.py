"""The order of an epoch in another library's loop, and what is drawn for its batches, after a restart within it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from elaunch.trainer.data.batches import EpochOrder
from elaunch.trainer.integrations import with_own

SIZE = 24


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), torch.rand(()).item()])


class EachIndex(Sampler[int]):
    """Draws each index when it is taken, from a global generator and one that it makes in its first epoch."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(int(torch.randint(2**40, ())))
        for _ in range(SIZE):
            yield (int(torch.randint(SIZE, (), generator=self.generator)) + random.randrange(SIZE)) % SIZE


class Wrapped(Dataset[int]):
    """As Lightning gives a sampler to a DistributedSampler."""

    def __init__(self) -> None:
        self._sampler = EachIndex()

    def __getitem__(self, index: int) -> int:
        return index


class Distributed(EachIndex):
    def __init__(self) -> None:
        self.dataset = Wrapped()

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset._sampler)


def collated(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + torch.rand(())


def trained(batches: Iterator[Any], count: int) -> list[list[list[float]]]:
    """So many batches, with steps that draw too."""
    taken = []
    for _ in range(count):
        taken.append(next(batches).tolist())
        torch.rand(3), random.random()
    return taken


def process(make: Callable[[], Any], workers: int = 0) -> tuple[EpochOrder, DataLoader[Any]]:
    """A new one, which makes the same objects as the one before."""
    torch.manual_seed(5)
    random.seed(5)
    return EpochOrder(), DataLoader(Noisy(), batch_size=4, sampler=make(), collate_fn=collated, num_workers=workers)


@pytest.mark.parametrize(
    ("make", "workers", "epoch"),
    [(lambda: RandomSampler(range(SIZE)), 0, 1), (EachIndex, 1, 0), (EachIndex, 0, 1), (Distributed, 0, 1)],
)
def test_samples_and_noise_of_an_epoch_do_not_depend_on_what_the_training_draws(
    make: Callable[[], Any], workers: int, epoch: int
) -> None:
    order, loader = process(make, workers)
    for _ in range(epoch):
        order.begin(loader)
        trained(iter(loader), 6)
    order.begin(loader)
    batches = iter(loader)
    trained(batches, 2)
    state = order.state_dict()
    expected = trained(batches, 4)

    other, loader = process(make, workers)
    other.load_state_dict(state)
    torch.rand(7), random.random()
    other.begin(loader, 2)

    assert trained(iter(loader), 4) == expected


@pytest.mark.parametrize("make", [EachIndex, Distributed])
@pytest.mark.parametrize("is_over", [True, False])
def test_an_epoch_begins_where_another_process_ended_the_one_before(make: Callable[[], Any], is_over: bool) -> None:
    order, loader = process(make)
    order.begin(loader)
    trained(iter(loader), 6)
    state = order.state_dict()
    torch.manual_seed(6)
    random.seed(6)
    order.begin(loader)
    expected = trained(iter(loader), 6)

    other, loader = process(make)
    other.load_state_dict(state)
    if is_over:
        other.over(loader)
    torch.manual_seed(6)
    random.seed(6)
    other.begin(loader)

    assert trained(iter(loader), 6) == expected


def test_what_is_drawn_for_a_batch_leaves_the_trainings_generators_alone() -> None:
    order, loader = EpochOrder(), DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=collated)
    order.begin(loader)
    batches = iter(loader)
    next(batches)
    before = torch.get_rng_state(), random.getstate()

    first, second = next(batches)[0, 1:].tolist(), next(batches)[0, 1:].tolist()

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert first != second


def test_options_of_the_program_come_after_those_of_the_integration() -> None:
    own, generator, average = object(), torch.Generator(), {"average": torch.zeros(1)}

    options = with_own({"per_rank": generator, "extra": average, "keep": 2}, per_rank=own, extra=own)

    assert options == {"per_rank": (own, generator), "extra": (own, average), "keep": 2}
    assert with_own({"extra": [1, 2]}, per_rank=own, extra=own)["extra"] == (own, [1, 2])
