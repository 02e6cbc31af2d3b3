"""`Batches`: an ordinary DataLoader comes back at the right sample."""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elaunch.trainer.data.batches import Batches
from elaunch.trainer.data.sampling import global_states, seed, set_global_states
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


def with_the_samplers_generator() -> DataLoader[Any]:
    dataset = Numbers()
    return DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset, generator=torch.Generator().manual_seed(8)))


class Augmented(Numbers):
    """Numbers with random ones."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), torch.rand(()).item(), np.random.rand()])


class Ours(Sampler[int]):
    """Draws from everything that is kept, at the epoch's beginning and with each index."""

    def __init__(self) -> None:
        self.generators = [np.random.default_rng(4), random.Random(4), np.random.RandomState(4)]
        self.ids, self.calls = [*range(SIZE)], 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        random.shuffle(self.ids)
        left = self.ids[self.calls :] + self.ids[: self.calls]
        for one in self.generators:
            one.shuffle(left)
        while left:
            yield left.pop(
                (random.randrange(SIZE) + np.random.randint(SIZE) + int(torch.randint(SIZE, ()))) % len(left)
            )


class ByTheClock(Ours):
    """Draws from what is unknown."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(self.ids, SIZE))


class Buffered(IterableDataset[float]):
    """A shuffle buffer."""

    def __iter__(self) -> Iterator[float]:
        buffer: list[int] = []
        for index in range(SIZE):
            buffer.append(index)
            if len(buffer) > 5:
                yield buffer.pop(random.randrange(5)) + torch.rand(()).item()
        yield from map(float, buffer)


LOADERS: list[Callable[[], DataLoader[Any]]] = [
    shuffled,
    distributed,
    lambda: shuffled(generator=torch.Generator().manual_seed(8)),
    with_the_samplers_generator,
    lambda: DataLoader(Numbers(), batch_size=None, sampler=RandomSampler(range(SIZE))),
    lambda: DataLoader(Endless(), batch_size=4),
    lambda: DataLoader(Augmented(), batch_size=4, sampler=Ours()),
    lambda: DataLoader(Buffered(), batch_size=4),
]
WITH_WORKERS: list[Callable[[], DataLoader[Any]]] = [
    lambda: shuffled(num_workers=1),
    lambda: shuffled(num_workers=1, persistent_workers=True),
    lambda: DataLoader(Augmented(), batch_size=4, sampler=Ours(), num_workers=2, persistent_workers=True),
    lambda: DataLoader(Buffered(), batch_size=4, num_workers=2, persistent_workers=True),
]


def draws_as_it_ends() -> DataLoader[Any]:
    """After 2 batches a loader process has made the loader take the epoch's end, and the sampler its next draw."""
    generator = torch.Generator().manual_seed(8)
    return DataLoader(Numbers(), batch_size=11, shuffle=True, num_workers=1, generator=generator)


class ByLoss(Sampler[int]):
    """Draws by what the program sets; with `is_lazy` each index as it is wanted."""

    def __init__(self, kind: str, *, is_lazy: bool = False) -> None:
        self.dice, size, self.is_lazy = np.random.default_rng(4), SIZE, is_lazy
        kinds: dict[str, Any] = {"list": [0.1] * size, "array": np.ones(size) / 10, "tensor": torch.ones(size) / 10}
        self.chances: Any = kinds[kind]

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        at_once = 1 if self.is_lazy else SIZE
        for _ in range(0, SIZE, at_once):
            chances = [*map(float, self.chances)]
            yield from self.dice.choice(SIZE, at_once, p=np.asarray(chances) / sum(chances)).tolist()


def change(sampler: Any, batch: Any) -> None:
    """What the program does between two batches."""
    seen = {int(one) for one in batch.reshape(-1)}
    if isinstance(sampler, SubsetRandomSampler):
        sampler.indices[:] = [(one + len(seen)) % SIZE for one in sampler.indices]
    elif isinstance(sampler, WeightedRandomSampler):
        sampler.weights[[*seen]] *= 1.1
    else:
        for one in seen:
            sampler.chances[one] *= 1.1


CHANGING: list[Callable[[], Any]] = [
    *(partial(ByLoss, kind) for kind in ("list", "array", "tensor")),
    lambda: WeightedRandomSampler(torch.ones(SIZE), SIZE),
]


def taken_and_changed(batches: Batches, sampler: Any, count: int) -> list[list[int]]:
    drawn = []
    for batch in itertools.islice(batches, count):
        change(sampler, batch)
        drawn.append(batch.tolist())
    return drawn


@pytest.mark.parametrize("workers", [0, slow(1)])
@pytest.mark.parametrize("make", CHANGING)
def test_what_a_program_changes_of_a_sampler_within_an_epoch_is_kept(make: Callable[[], Any], workers: int) -> None:
    seed(5)
    sampler = make()
    batches = Batches(DataLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=workers))
    taken_and_changed(batches, sampler, 2)
    states = []
    # Two failures in one epoch.
    for count in (1, 9):
        states.append((copy.deepcopy(batches.state_dict()), global_states()))
        expected = taken_and_changed(batches, sampler, count)

        seed(77)
        sampler = make()
        batches = Batches(DataLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=workers))
        batches.load_state_dict(states[-1][0])
        set_global_states(states[-1][1])
        assert taken_and_changed(batches, sampler, count) == expected


@pytest.mark.parametrize(
    "make", [lambda: ByLoss("list", is_lazy=True), lambda: SubsetRandomSampler([*range(SIZE)])], ids=["ours", "torch's"]
)
def test_a_change_that_counts_in_the_same_epoch_is_refused_after_a_restart(make: Callable[[], Any]) -> None:
    sampler = make()
    batches = Batches(DataLoader(Numbers(), batch_size=2, sampler=sampler))
    for batch in itertools.islice(batches, SIZE // 4):
        for _ in range(20):
            change(sampler, batch)

    again = Batches(DataLoader(Numbers(), batch_size=2, sampler=make()))
    again.load_state_dict(batches.state_dict())

    with pytest.raises(RuntimeError, match="draws a different order"):
        next(again)


def test_torchs_subset_may_change_after_an_epochs_last_batch() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler([*range(8)]))

    seed(5)
    batches = Batches(loader := make())
    taken(batches, 2)
    sampler: Any = loader.sampler
    sampler.indices[:] = [*range(8, 16)]

    assert_goes_on(batches, make)


# At the start, within the first epoch, at the end of one (of 3, 6 or 22 batches), and in a later one.
BEFORE = [0, 3, 5, 6, 22, 23]
# Each loader's worker is a process.
QUICK = [*zip(WITH_WORKERS, (6, 3, 6, 3), strict=True), (WITH_WORKERS[2], 11), (draws_as_it_ends, 2)]


def taken(batches: Batches, count: int) -> list[list[float]]:
    """Batches, between which the training draws random numbers too."""
    drawn: list[list[float]] = []
    for batch in itertools.islice(batches, count):
        drawn.append([*batch.reshape(-1).tolist(), torch.rand(()).item(), random.random(), np.random.rand()])
    return drawn


def assert_goes_on(first: Batches, make: Callable[[], DataLoader[Any]]) -> None:
    """A new process takes the batches that this one takes from now on."""
    state, states = copy.deepcopy(first.state_dict()), global_states()
    expected = taken(first, 9)

    seed(77)
    second = Batches(make())
    second.load_state_dict(state)
    set_global_states(states)

    assert taken(second, 9) == expected


@pytest.mark.parametrize(
    ("make", "before"),
    [
        *itertools.product(LOADERS, BEFORE),
        *QUICK,
        *(slow(*each) for each in itertools.product(WITH_WORKERS, BEFORE) if each not in QUICK),
    ],
)
def test_a_new_process_goes_on_with_the_next_batch(make: Callable[[], DataLoader[Any]], before: int) -> None:
    seed(5)
    first = Batches(make())
    taken(first, before)

    assert_goes_on(first, make)


def test_what_is_done_is_not_loaded_again() -> None:
    first = Batches(shuffled())
    taken(first, 3)
    loader = shuffled()
    second = Batches(loader)
    second.load_state_dict(first.state_dict())

    next(second)

    assert isinstance(loader.dataset, Numbers)
    assert len(loader.dataset.read) == 4


def test_an_order_that_cannot_be_drawn_again_is_refused_at_the_first_batch() -> None:
    with pytest.raises(ValueError, match="ByTheClock draws its order from something that no restart can restore"):
        next(Batches(DataLoader(Numbers(), batch_size=4, sampler=ByTheClock())))


def test_a_loader_that_is_dropped_is_gone_at_once() -> None:
    batches = Batches(loader := shuffled())
    next(batches)
    dropped = weakref.ref(loader)

    del batches, loader

    assert dropped() is None
