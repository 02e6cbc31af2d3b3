"""The batches of an ordinary DataLoader, from the right one on after a restart."""

from __future__ import annotations

import itertools
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elaunch.trainer.data.order import Samples
from elaunch.trainer.data.order_states import (
    Streams,
    global_states,
    is_torchs,
    own_states,
    set_global_states,
    set_own_states,
)
from elaunch.trainer.data.sampling import seed

# So many batches are drawn twice, to see whether an order can be drawn again.
_TRIED = 8
# What a sampler may do.
WAY_OUT = (
    "Let the sampler draw from random, numpy.random, torch, or a generator that is an attribute of it. A list that is "
    "changed in place may have 8192 numbers, a tensor or an array 262144; a sampler shuffles a copy of a longer one"
)


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
        # Where the sampler is now: it may be ahead of the batches, and the program may have changed it.
        self._now: dict[str, Any] = {}
        self._is_torchs = self._is_tried = _is_torchs(loader)
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        if not self._is_iterable:
            self._sampler = _skipping(loader)
        elif loader.persistent_workers:
            # The random states of workers that stay are not known after a restart; new ones begin with a seed.
            object.__setattr__(loader, "persistent_workers", False)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the last batch."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch."""
        # Until the first batch it is where an earlier process was.
        now = self._now if self._is_iterable or self._iterator is None else drawn_by(self._loader)
        return {"epoch": self._epoch, "batch": self._batch, "began": self._began, "now": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after that position."""
        self._epoch, self._batch, self._began, self._now = (state[name] for name in ("epoch", "batch", "began", "now"))
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
        seeds = {} if self._is_torchs else {"seeds": Streams.seeds()}
        self._began, self._now = generator_states(self._loader) | seeds, {}
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

    `now` is what `drawn_by` returned after them. With `began`, what `generator_states` returned when the
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


def drawn_by(loader: DataLoader[Any]) -> dict[str, Any]:
    """What `skip_once` needs to bring the sampler back to where it is now, as the program may have changed it.

    So it does with weights by loss. The first call begins to watch the loader: for later iterators.
    """
    return _skipping(loader).drawn_now()


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
    set_own_states_of(loader, states["own"])


def own_states_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The states of the generators, counters and short lists of the loader and its samplers."""
    return own_states(_roots(loader))


def set_own_states_of(loader: DataLoader[Any], states: dict[str, Any]) -> None:
    """Set them to what `own_states_of` returned."""
    set_own_states(_roots(loader), states)


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


class SkippingOnce:
    """A sampler whose next used iterator leaves out the first `count`, and draws from `streams`.

    `roots` returns what has the sampler's states.
    """

    def __init__(self, inner: Any, roots: Callable[[], dict[str, Any]]) -> None:
        self.inner, self._roots = inner, roots
        self.prepare(0)

    def prepare(
        self,
        count: int,
        streams: Streams | None = None,
        key: int | None = None,
        now: dict[str, Any] | None = None,
        apart: Apart | None = None,
    ) -> None:
        """Do so for the next iterator. With `key` each batch has a key of its own, as those of `Order.batches` have.

        Worker processes seed their generators with it, and without them `apart` does so. `now` is what `drawn_now`
        returned.
        """
        self._count, self._streams, self._key = count, streams, key
        self._apart = apart
        # Where another rank draws for all, this one has drawn nothing.
        self._now = now if now and now["total"] >= count else {}
        # How many indices were used in this epoch, and their checksum; and how many were drawn from the sampler.
        self._total = self._order = self._drawn = 0
        self._ready: Iterator[Any] | None = None

    def draw(self) -> None:
        """Draw the first indices of the next iterator now. Raises RuntimeError if they are others than `now` has."""
        count, now, self._count, self._now = self._count, self._now, 0, {}
        inner = iter(self.inner) if self._streams is None else self._streams.drawing(lambda: iter(self.inner))
        skipped = checksum_of(itertools.islice(inner, count))
        # With the first one a sampler draws its epoch's order.
        ahead = [*itertools.islice(inner, now["drawn"] - count if now else 1)]
        if now:
            if checksum_of(ahead[: now["total"] - count], skipped) != now["order"]:
                raise RuntimeError(
                    f"{self.names} draws another order than the process before: samples would come "
                    f"twice or never. {WAY_OUT}"
                )
            set_own_states(self._roots(), now["own"])
        self._total, self._order, self._drawn = count, skipped, count + len(ahead)
        self._ready = itertools.chain(ahead, inner)

    def __iter__(self) -> Iterator[Any]:
        # Not before the first index is taken: with workers DataLoader makes two iterators, and drops the first.
        if self._ready is None:
            self.draw()
        assert self._ready is not None
        ready, self._ready = self._ready, None
        key, apart = self._key, self._apart
        self._key = self._apart = None
        for number, indices in enumerate(ready, self._total):
            self._total, self._order = self._total + 1, checksum_of([indices], self._order)
            self._drawn = max(self._drawn, self._total)
            if apart is not None and key is not None:
                apart.begin(key << 32 | number)
            yield indices if key is None else _with_key(key, number, indices)

    def drawn_now(self) -> dict[str, Any]:
        """What `prepare` needs to go on from here."""
        own = own_states(self._roots())
        return {"drawn": self._drawn, "total": self._total, "order": self._order, "own": own}

    @property
    def names(self) -> str:
        """The types of the samplers that are not torch's."""
        inner = [self.inner, getattr(self.inner, "sampler", None)]
        return " or ".join(type(one).__name__ for one in inner if not is_torchs(one, alone=True)) or "its sampler"

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _with_key(key: int, number: int, indices: Any) -> Any:
    if not isinstance(indices, list) or isinstance(indices, Samples):
        return indices
    return _Keyed(tuple(indices), 0, number, key << 32 | number)


class _Keyed(Samples):
    """The indices of a batch. A worker process that receives them seeds its generators: which it had does not count."""

    def __reduce__(self) -> Any:
        return _received, (tuple(self), self.micro, self.key)


def _received(ids: tuple[int, ...], number: int, key: int) -> Samples:
    # DataLoader's workers load the indices of a batch when they are about to read it.
    if get_worker_info() is not None:
        seed(key)
    return Samples(ids, 0, number, key)


class Apart:
    """The collate function of a loader without workers.

    What it and the dataset draw for a batch comes from generators that are seeded for that batch, not from those of the
    training: a loop may load ahead of its steps.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._outer: dict[str, Any] | None = None

    def begin(self, key: int) -> None:
        """A batch is loaded now."""
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


def checksum_of(batches: Iterable[Any], before: int = 0) -> int:
    """Of the batches' indices, after others; that of the last one is 0 if its indices are no numbers."""
    for indices in batches:
        try:
            numbers = array("q", indices if isinstance(indices, list | tuple) else [indices])
            before = zlib.crc32(numbers.tobytes(), before)
        except (TypeError, OverflowError):
            before = 0
    return before
