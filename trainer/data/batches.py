"""The batches of an ordinary DataLoader, from the right one on after a restart."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from elaunch.trainer.data.order_states import (
    Streams,
    global_states,
    is_torchs,
    own_states,
    set_global_states,
    set_own_states,
)
from elaunch.trainer.data.skipping import WAY_OUT, Apart, SkippingOnce, checksum_of

# So many batches are drawn twice, to see whether an order can be drawn again.
_TRIED = 8


class Batches:
    """The batches of `loader`, epoch after epoch without an end: `next(batches)` in the loop.

    As `per_rank` of a Keeper it comes back at the right batch, at the same number of ranks, with any sampler that draws
    from global generators, or from generators, counters and short lists of its own. One whose order cannot be drawn
    again is refused. Each epoch calls the sampler's `set_epoch`, if it has one. After a restart the batches before are
    not loaded, only their indices are drawn; an iterable dataset is read again.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise ValueError(
                "a DataLoader with in_order=False returns batches in no order that a restart could go on with; leave "
                "in_order=False out"
            )
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._batch = 0
        # The generators' states when this epoch began, from which a sampler draws the epoch's order.
        self._began: dict[str, Any] = {}
        # A checksum of the indices of this epoch's batches so far; 0 if they are no numbers.
        self._order = 0
        # Where the sampler is now, if the program has changed it since the epoch began.
        self._now: dict[str, Any] = {}
        self._is_torchs = self._is_tried = _is_torchs(loader)
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        if not self._is_iterable:
            self._sampler = _skipping(loader)
            self._sampler.drawn = deque()
        elif loader.persistent_workers:
            # The random states of workers that stay are not known after a restart; new ones begin with a seed.
            object.__setattr__(loader, "persistent_workers", False)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the last batch."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch."""
        state = {"epoch": self._epoch, "batch": self._batch, "began": self._began, "order": self._order}
        # Until the first batch it is where an earlier process was.
        now = self._now if self._is_iterable or self._iterator is None else changed_by_program(self._loader)
        return {**state, "now": now} if now else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that position."""
        self._epoch, self._batch, self._began = state["epoch"], state["batch"], state["began"]
        self._order, self._now = state.get("order", 0), state.get("now", {})
        self._iterator = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._resumed() if self._began else self._begin()
        for batch in self._iterator:
            self._batch += 1
            if not self._is_iterable:
                self._order = self._sampler.drawn.popleft()
            return batch
        if not self._batch:
            raise RuntimeError("the DataLoader has no batch: its dataset is empty, or smaller than a batch")
        self._epoch, self._batch = self._epoch + 1, 0
        self._iterator = self._begin()
        return next(self)

    def _begin(self) -> Iterator[Any]:
        set_epoch(self._loader, self._epoch)
        seeds = {} if self._is_torchs else {"seeds": Streams.seeds()}
        self._began, self._order, self._now = generator_states(self._loader) | seeds, 0, {}
        if not self._is_tried:
            self._is_tried = True
            require_drawable_again(self._loader, self._began)
        return self._iterated(0)

    def _resumed(self) -> Iterator[Any]:
        """The rest of the epoch. What is drawn for it is not drawn from the generators of the training."""
        now = global_states()
        try:
            if self._epoch and not self._is_iterable:
                first_iterator(self._loader)
            set_generator_states(self._loader, self._began)
            set_epoch(self._loader, self._epoch)
            return self._iterated(self._batch)
        finally:
            set_global_states(now)

    def _iterated(self, done: int) -> Iterator[Any]:
        """An iterator of the loader without its first `done` batches, whose order is drawn now."""
        streams, key = _drawing_from(self._began, self._epoch)
        if self._is_iterable:
            # A worker process has generators of its own.
            its = None if self._loader.num_workers else streams
            batches = iter(self._loader) if its is None else its.drawing(lambda: iter(self._loader))
            for _ in itertools.islice(batches, done):
                pass
            return batches
        self._sampler.prepare(done, streams, key, now=self._now)
        batches = iter(self._loader)
        if not self._loader.num_workers:
            # Workers have drawn already.
            self._sampler.draw()
        if self._order and not self._now and self._sampler.skipped not in (0, self._order):
            raise RuntimeError(
                f"{self._sampler.names} draws another order for epoch {self._epoch} than the process before: samples "
                f"would come twice or never. {WAY_OUT}"
            )
        return batches


def first_iterator(loader: DataLoader[Any]) -> None:
    """Let a loader whose workers stay make its first iterator, which draws their seed too. Later ones draw less."""
    if loader.persistent_workers:
        skip_once(loader, 0)
        if loader._iterator is None:
            iter(loader)


def require_skippable(loader: DataLoader[Any]) -> None:
    """Raise ValueError if `skip_once` cannot pass over batches of this loader."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"{type(loader.dataset).__name__} is an IterableDataset, and after a restart it would begin at its first "
            "sample again; use a dataset with __getitem__ and __len__, or a loop of your own with Keeper and "
            "Batches(loader), which passes over what was done"
        )


def require_drawable_again(loader: DataLoader[Any], began: dict[str, Any]) -> None:
    """Raise ValueError if the order depends on something that is not kept; `began` is as for `skip_once`.

    An iterable dataset is not tried, nor is a sampler of torch.
    """
    if _is_torchs(loader) or isinstance(loader.dataset, IterableDataset):
        return
    sampler = _skipping(loader)
    if hasattr(sampler.inner, "__next__"):
        return
    orders = []
    for _ in range(2):
        set_own_states_of(loader, began["own"])
        indices = Streams(began["seeds"]).drawing(lambda: iter(sampler.inner))
        orders.append(checksum_of(itertools.islice(indices, _TRIED)))
    set_own_states_of(loader, began["own"])
    if orders[0] != orders[1]:
        raise ValueError(
            f"{sampler.names} draws its order from something that no restart can know: two draws from the "
            f"same random states and attributes differ. {WAY_OUT}"
        )


def skip_once(
    loader: DataLoader[Any],
    batches: int,
    now: dict[str, Any] | None = None,
    *,
    began: dict[str, Any] | None = None,
    epoch: int = 0,
) -> None:
    """Let the next iterator of `loader` begin after so many batches. They are not loaded.

    `now` is what `changed_by_program` returned after them. With `began`, what `generator_states` returned when the
    epoch began and "seeds" of `Streams`, order and batches do not depend on what the training draws meanwhile.
    """
    streams, key = _drawing_from(began, epoch) if began else (None, None)
    if key is not None and not loader.num_workers and not isinstance(loader.collate_fn, Apart):
        loader.collate_fn = Apart(loader.collate_fn)
    apart = loader.collate_fn if isinstance(loader.collate_fn, Apart) else None
    _skipping(loader).prepare(batches, streams, key, now=now, apart=apart)


def _drawing_from(began: dict[str, Any], epoch: int) -> tuple[Streams | None, int]:
    """The generators of the samplers in an epoch, and its key."""
    streams = Streams(began["seeds"]) if "seeds" in began else None
    return streams, zlib.crc32(bytes(began["torch"].tolist()), epoch)


def changed_by_program(loader: DataLoader[Any]) -> dict[str, Any]:
    """What `skip_once` needs if the program, and not the sampler, has changed the sampler since the epoch began.

    So it does with weights by loss. {} if it has not. Raises NotRestorable. The first call
    begins to watch the loader: for later iterators.
    """
    return _skipping(loader).changed()


def _skipping(loader: DataLoader[Any]) -> SkippingOnce:
    """The sampler that gives `loader` its indices, wrapped."""
    # A loader without a batch sampler has a sample for a batch.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    if not isinstance(sampler, SkippingOnce):
        sampler = SkippingOnce(sampler, partial(_roots_of, weakref.ref(loader)))
        # DataLoader refuses another sampler, since its own length would be wrong. This one has the same length.
        object.__setattr__(loader, name, sampler)
        # Workers that stay have an iterator with the other sampler.
        loader._iterator = None
    return sampler


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell the loader's samplers, or its iterable dataset, which epoch begins."""
    owners: tuple[Any, ...] = (loader.sampler, loader.batch_sampler)
    for one in (*owners, loader.dataset) if isinstance(loader.dataset, IterableDataset) else owners:
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)


def generator_states(loader: DataLoader[Any]) -> dict[str, Any]:
    """The present states from which a sampler draws an epoch's order: of torch's generator, and of the loader's own.

    If the samplers are not torch's, also of the other global generators.
    """
    states = {"torch": torch.get_rng_state()} if _is_torchs(loader) else global_states()
    return {**states, "own": own_states_of(loader)}


def set_generator_states(loader: DataLoader[Any], states: dict[str, Any]) -> None:
    """Set them to what `generator_states` returned."""
    set_global_states(states)
    set_own_states_of(loader, own_of(states))


def own_states_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The states of the generators, counters and short lists of the loader and its samplers."""
    return own_states(_roots(loader))


def set_own_states_of(loader: DataLoader[Any], states: dict[str, Any]) -> None:
    """Set them to what `own_states_of` returned."""
    set_own_states(_roots(loader), states)


def own_of(states: dict[str, Any]) -> dict[str, Any]:
    """Of what `generator_states` returned the part that the loader has for itself."""
    # A checkpoint of an earlier release has one generator there.
    places = ("generator", "synchronized_generator", "sampler.generator") if "loader" in states else ()
    own: dict[str, Any] = states.get("own", {})
    return own | dict.fromkeys(places, states.get("loader"))


def _roots_of(loader: Callable[[], Any]) -> dict[str, Any]:
    # A weak reference: the loader has the sampler that calls this, and a loader that is dropped is to be gone at once.
    return _roots(loader())


def _roots(loader: Any) -> dict[str, Any]:
    """What gives the order, or has the generators for that."""
    # Accelerate's loaders have a generator that all ranks share.
    roots = {name: getattr(loader, name, None) for name in ("generator", "synchronized_generator")}
    if not isinstance(loader.dataset, IterableDataset):
        return roots | {"sampler": _inner(loader.sampler), "batch_sampler": _inner(loader.batch_sampler)}
    # A worker has a copy of the dataset, as it is when the epoch begins.
    return roots if loader.num_workers else roots | {"dataset": loader.dataset}


def _is_torchs(loader: Any) -> bool:
    samplers = (loader.sampler, loader.batch_sampler)
    return not isinstance(loader.dataset, IterableDataset) and all(is_torchs(_inner(one)) for one in samplers)


def _inner(sampler: Any) -> Any:
    return sampler.inner if isinstance(sampler, SkippingOnce) else sampler
