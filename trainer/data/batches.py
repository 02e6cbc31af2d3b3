"""The batches of an ordinary DataLoader, from the right one on after a restart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


class Batches:
    """The batches of `loader`, epoch after epoch without an end: `next(batches)` in the loop.

    As `per_rank` of a Keeper it comes back at the right batch, with any sampler that draws from torch's generators or
    from `loader.generator`, at the same number of ranks. Each epoch calls the sampler's `set_epoch`, if it has one.
    After a restart the batches before are not loaded, only their indices are drawn; an iterable dataset is read again.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._batch = 0
        # The generators' states when this epoch began, from which a sampler draws the epoch's order.
        self._began: dict[str, Any] = {}

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the last batch."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch."""
        return {"epoch": self._epoch, "batch": self._batch, "began": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that position."""
        self._epoch, self._batch, self._began = state["epoch"], state["batch"], state["began"]
        self._iterator = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._resumed() if self._began else self._begin()
        for batch in self._iterator:
            self._batch += 1
            return batch
        if not self._batch:
            raise RuntimeError("the DataLoader has no batch: its dataset is empty, or smaller than a batch")
        self._epoch, self._batch = self._epoch + 1, 0
        self._iterator = self._begin()
        return next(self)

    def _begin(self) -> Iterator[Any]:
        set_epoch(self._loader, self._epoch)
        self._began = generator_states(self._loader)
        return iter(self._loader)

    def _resumed(self) -> Iterator[Any]:
        """The rest of the epoch. What is drawn for it is not drawn from the generators of the training."""
        now = torch.get_rng_state()
        if self._loader.persistent_workers and self._epoch:
            # Later epochs of such a loader draw less than its first one, which seeds the workers.
            skip_once(self._loader, 0)
            iter(self._loader)
        set_generator_states(self._loader, self._began)
        try:
            set_epoch(self._loader, self._epoch)
            rest = iter_from(self._loader, self._batch)
            # The sampler draws when its first indices are taken.
            first = [*itertools.islice(rest, 1)]
        finally:
            torch.set_rng_state(now)
        return itertools.chain(first, rest)


def iter_from(loader: DataLoader[Any], batches: int) -> Iterator[Any]:
    """An iterator of `loader` without its first `batches`. They are not loaded, unless the dataset is iterable."""
    if isinstance(loader.dataset, IterableDataset):
        rest = iter(loader)
        for _ in itertools.islice(rest, batches):
            pass
        return rest
    skip_once(loader, batches)
    return iter(loader)


def skip_once(loader: DataLoader[Any], batches: int) -> None:
    """Let the next iterator of `loader` begin after so many batches."""
    # A loader without a batch sampler has a sample for a batch.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    if not isinstance(sampler, _SkippingOnce):
        sampler = _SkippingOnce(sampler)
        # DataLoader refuses another sampler, since its own length would be wrong. This one has the same length.
        object.__setattr__(loader, name, sampler)
    sampler.count = batches


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell the loader's samplers which epoch begins."""
    samplers: tuple[Any, ...] = (loader.sampler, loader.batch_sampler)
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


class _SkippingOnce:
    """A sampler whose next used iterator leaves out the first `count`."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.count = sampler, 0

    def __iter__(self) -> Iterator[Any]:
        # Not before the first index is taken: with workers DataLoader makes two iterators, and drops the first.
        count, self.count = self.count, 0
        yield from itertools.islice(iter(self._sampler), count, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def generator_states(loader: DataLoader[Any]) -> dict[str, Any]:
    """The present states of torch's generator and of the loader's own, from which a sampler draws an epoch's order."""
    own = _own_generator(loader)
    return {"torch": torch.get_rng_state()} | ({} if own is None else {"loader": own.get_state()})


def set_generator_states(loader: DataLoader[Any], states: dict[str, Any]) -> None:
    """Set them to what `generator_states` returned."""
    torch.set_rng_state(states["torch"].clone())
    own = _own_generator(loader)
    if own is not None and "loader" in states:
        own.set_state(states["loader"].clone())


def _own_generator(loader: Any) -> torch.Generator | None:
    # Accelerate's loaders have a generator that all ranks share.
    owners = ((loader, "generator"), (loader.sampler, "generator"), (loader, "synchronized_generator"))
    found = (getattr(owner, name, None) for owner, name in owners)
    return next((one for one in found if isinstance(one, torch.Generator)), None)
