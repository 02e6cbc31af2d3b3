"""The order of a DataLoader's epochs, which a restart draws again; `Batches` are its batches in a loop of one's own."""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elaunch.trainer.data.order import Samples, key_of
from elaunch.trainer.data.sampling import (
    Streams,
    global_states,
    is_torchs,
    own_states,
    seed,
    set_global_states,
    set_own_states,
)

_Draw: TypeAlias = "Callable[[Any], Iterator[Any]]"
# This many batches are drawn twice, to check that an order can be drawn again.
_TRIED = 8
# What a sampler may do.
WAY_OUT = (
    "Let the sampler draw from random, numpy.random, torch, or a generator that is an attribute of it. A list that is "
    "changed in place may have 8192 numbers, a tensor or an array 262144; a sampler shuffles a copy of a longer one"
)


class Batches:
    """The batches of `loader`, epoch after epoch, endlessly: `next(batches)` in the loop.

    As `per_rank` of a Keeper it continues at the right batch, at the same number of ranks, with any sampler that draws
    from global generators, or from generators, counters and short lists of its own. One whose order cannot be drawn
    again is refused. Each epoch calls the sampler's `set_epoch`, if it has one. After a restart the batches before are
    not loaded, only their indices are drawn; an iterable dataset is read again.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise ValueError(
                "a DataLoader with in_order=False returns batches in an order that no restart can reproduce; "
                "leave in_order=False out"
            )
        self._loader, self._order = loader, EpochOrder(is_ahead=False)
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._batch = 0
        if isinstance(loader.dataset, IterableDataset) and loader.persistent_workers:
            # The random states of persistent workers are not known after a restart; new ones begin with a seed.
            object.__setattr__(loader, "persistent_workers", False)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch."""
        return {"epoch": self._epoch, "batch": self._batch, "order": self._order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that position."""
        self._epoch, self._batch, self._iterator = state["epoch"], state["batch"], None
        self._order.load_state_dict(state["order"])

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin()
        for batch in self._iterator:
            self._batch += 1
            return batch
        if not self._batch:
            raise RuntimeError("the DataLoader has no batch: its dataset is empty, or smaller than a batch")
        self._epoch, self._batch = self._epoch + 1, 0
        self._iterator = self._begin()
        return next(self)

    def _begin(self) -> Iterator[Any]:
        """The batches of the epoch without those that are done. They do not draw from the training's generators."""
        set_epoch(self._loader, self._epoch)
        self._order.begin(self._loader, self._batch)
        if isinstance(self._loader.dataset, IterableDataset):
            batches = self._order.streams().drawing(lambda: iter(self._loader))
            for _ in itertools.islice(batches, self._batch):
                pass
            return batches
        return iter(self._loader)


class EpochOrder:
    """The states from which a loader's samplers draw an epoch's order, and their position. Stateful, for `per_rank`.

    They draw from global generators of their own, so what the training draws meanwhile does not count. With `is_ahead`
    the loop may load batches ahead of its steps.
    """

    def __init__(self, *, is_ahead: bool = True) -> None:
        self._is_ahead = is_ahead
        self._roots: dict[str, Any] = {}
        # How many epochs have begun; the seeds and the own states from which the samplers draw this one; how many
        # batches the loader has taken, and the checksum of their indices; how many were drawn, the end included. "now":
        # the own states when another process saved this.
        self._state: dict[str, Any] = {"epoch": 0, "seeds": {}, "own": {}, "taken": 0, "order": 0, "drawn": 0}
        # How many batches of the epoch an earlier process has done.
        self._done, self._is_tried = 0, False
        self._isolated: IsolatedCollate | None = None

    def begin(self, loader: Any, done: int = 0) -> None:
        """The next iterator of `loader` begins an epoch, or resumes another process's after `done` batches."""
        self._roots = _watch(loader, self._draw)
        if self._is_ahead and not loader.num_workers:
            if not isinstance(loader.collate_fn, IsolatedCollate):
                loader.collate_fn = IsolatedCollate(loader.collate_fn)
            self._isolated = loader.collate_fn
        if "dataset" in self._roots:
            # The dataset reaches these states as it is read again.
            self._state.pop("now", None)
        if not done or not self._state["seeds"]:
            self.over(loader)
            fresh = {"epoch": self._state["epoch"] + 1, "seeds": Streams.seeds()}
            self._state = {**fresh, "own": None, "taken": 0, "order": 0, "drawn": 0}
        # An iterator draws its workers' seed from it, rarely with persistent workers.
        loader.generator = torch.Generator().manual_seed(self._state["seeds"]["torch"])
        self._done = done

    def skip(self, loader: Any) -> None:
        """The next iterator of `loader` has no batch, since its epoch was done by an earlier process."""
        _watch(loader, lambda _: iter(()))

    def over(self, loader: Any) -> None:
        """The epoch of another process has no batch left: the next one begins where it ended."""
        self._roots = _watch(loader)
        if "now" in self._state:
            set_own_states(self._roots, self._state.pop("now"))

    def streams(self) -> Streams:
        """The generators of the epoch's order, with the samplers as when it began."""
        if self._state["own"] is None:
            self._state["own"] = own_states(self._roots)
        else:
            set_own_states(self._roots, self._state["own"])
        return Streams(self._state["seeds"])

    def state_dict(self) -> dict[str, Any]:
        """Seeds and states at the beginning of the epoch, and the sampler's own ones now: the program may set them."""
        if "now" in self._state:
            return dict(self._state)
        return {**self._state, "now": own_states(self._roots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue another process's order."""
        self._state, self._roots = dict(state), {}

    def _draw(self, sampler: Any) -> Iterator[Any]:
        """The indices of `sampler` that are not done. Runs when the loader takes the first one.

        Raises ValueError if its order cannot be drawn again, RuntimeError if it differs from the one before.
        """
        state, done = self._state, self._done
        streams = self.streams()
        if not self._is_tried:
            self._is_tried = True
            self._require_drawable_again(sampler)
        indices = streams.drawing(lambda: iter(sampler), at_once=is_torchs(sampler))
        order = checksum_of(itertools.islice(indices, done))
        # The loader may have prefetched.
        ahead = [*itertools.islice(indices, max(0, state["drawn"] - done))]
        now = state.pop("now", None)
        # If another rank draws for all, this one has drawn nothing.
        if now is not None and state["taken"] >= done:
            if checksum_of(ahead[: state["taken"] - done], order) != state["order"]:
                raise RuntimeError(
                    f"{_names(sampler)} draws a different order than the process before: samples would be repeated or "
                    f"skipped. {WAY_OUT}"
                )
            set_own_states(self._roots, now)
        state.update(taken=done, order=order)
        for number, batch in enumerate(itertools.chain(ahead, indices), done):
            state.update(taken=number + 1, order=checksum_of([batch], state["order"]))
            state["drawn"] = max(state["drawn"], number + 1)
            key = key_of(state["seeds"]["torch"], state["epoch"], number)
            if self._isolated is not None:
                self._isolated.begin(key)
            is_bare = isinstance(batch, list) and not isinstance(batch, Samples)
            yield _Keyed(tuple(batch), 0, number, key) if is_bare else batch
        # A sampler may draw as it ends, as RandomSampler does. Loader processes come to that before the last batch.
        state["drawn"] = max(state["drawn"], state["taken"] + 1)

    def _require_drawable_again(self, sampler: Any) -> None:
        if is_torchs(sampler) or hasattr(sampler, "__next__"):
            return
        orders = set()
        for _ in range(2):
            indices = self.streams().drawing(lambda: iter(sampler))
            orders.add(checksum_of(itertools.islice(indices, _TRIED)))
        self.streams()
        if len(orders) > 1:
            raise ValueError(
                f"{_names(sampler)} draws its order from something that no restart can restore: two draws from the "
                f"same random states and attributes differ. {WAY_OUT}"
            )


def _watch(loader: Any, draw: _Draw | None = None) -> dict[str, Any]:
    """Let `draw` supply the indices of the loader's next iterator. Returns what defines the order, by name."""
    if isinstance(loader.dataset, IterableDataset):
        return {"dataset": loader.dataset}
    # A loader without a batch sampler has one sample per batch.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    if not isinstance(sampler, _Watched):
        sampler = _Watched(sampler)
        # DataLoader refuses another sampler, since its own length would be wrong. This one has the same length.
        object.__setattr__(loader, name, sampler)
        # The iterator of persistent workers has the old sampler.
        loader._iterator = None
    if draw is not None:
        sampler.draw = draw
    samplers = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    return {name: one.inner if isinstance(one, _Watched) else one for name, one in samplers.items()}


class _Watched:
    """A sampler whose next iterator is `draw`'s, if there is one. Others are the sampler's own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.draw: _Draw | None = None

    def __iter__(self) -> Iterator[Any]:
        # Not before the first index is taken: with workers DataLoader makes two iterators, and drops the first.
        draw, self.draw = self.draw, None
        yield from iter(self.inner) if draw is None else draw(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Keyed(Samples):
    """The indices of a batch. A worker process that unpickles them seeds its generators with `key`."""

    def __reduce__(self) -> Any:
        return _received, (tuple(self), self.micro, self.key)


def _received(ids: tuple[int, ...], number: int, key: int) -> Samples:
    # DataLoader's workers unpickle the indices of a batch when they are about to read it.
    if get_worker_info() is not None:
        seed(key)
    return Samples(ids, 0, number, key)


class IsolatedCollate:
    """The collate function of a loader without workers.

    What it and the dataset draw for a batch comes from generators that are seeded for that batch, not from those of the
    training: a loop may load ahead of its steps.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._outer: dict[str, Any] | None = None

    def begin(self, key: int) -> None:
        """Seed the generators for the next batch."""
        if self._outer is None:
            self._outer = global_states()
        seed(key)

    def __call__(self, samples: Any) -> Any:
        try:
            return self._collate(samples)
        finally:
            if self._outer is not None:
                set_global_states(self._outer)
                self._outer = None


def require_skippable(loader: DataLoader[Any]) -> None:
    """Raise ValueError if batches of this loader cannot be skipped."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"{type(loader.dataset).__name__} is an IterableDataset, and after a restart it would begin at its first "
            "sample again; use a dataset with __getitem__ and __len__, or a loop of your own with Keeper and "
            "Batches(loader), which skips what was done"
        )


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Set the epoch that begins, in the loader's samplers or in its iterable dataset."""
    owners: tuple[Any, ...] = (loader.sampler, loader.batch_sampler)
    for one in (*owners, loader.dataset) if isinstance(loader.dataset, IterableDataset) else owners:
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)


def _names(sampler: Any) -> str:
    """The types of the samplers that are not torch's."""
    inner = [sampler, getattr(sampler, "sampler", None)]
    return " or ".join(type(one).__name__ for one in inner if not is_torchs(one, alone=True)) or "its sampler"


def checksum_of(batches: Iterable[Any], before: int = 0) -> int:
    """The CRC-32 of the batches' indices, continuing `before`; from 0 after indices that are not integers."""
    for indices in batches:
        try:
            numbers = array("q", indices if isinstance(indices, list | tuple) else [indices])
            before = zlib.crc32(numbers.tobytes(), before)
        except (TypeError, OverflowError):
            before = 0
    return before
