"""The batches of an ordinary DataLoader, from the right one on after a restart."""

from __future__ import annotations

import itertools
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elaunch.trainer.data.order import Samples
from elaunch.trainer.data.order_states import (
    Streams,
    Watched,
    global_states,
    is_torchs,
    own_states,
    set_global_states,
    set_own_states,
)
from elaunch.trainer.data.sampling import seed
from elaunch.trainer.state.tree import some

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
        self._order, self._now = state["order"], state.get("now", {})
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


class NotRestorable(ValueError):
    """The program has changed its sampler so that no restart could draw the same order."""


class SkippingOnce:
    """A sampler whose next used iterator leaves out the first `count`, and draws from `streams`.

    `drawn` gets a checksum of all indices so far with each batch, and `skipped` that of those that were left out.
    `roots` returns what has the sampler's states.
    """

    def __init__(self, inner: Any, roots: Callable[[], dict[str, Any]]) -> None:
        self.inner, self._roots = inner, roots
        self._is_torchs = is_torchs(inner)
        self.drawn: deque[int] = deque(maxlen=0)
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

        Worker processes seed their generators with it, and without them `apart` does so. `now` is what `changed`
        returned.
        """
        self._count, self._streams, self._key, self.skipped = count, streams, key, 0
        self._apart = apart
        self._now = now or {}
        # Whether the program has changed the sampler since this epoch's first draw.
        self._watched: Watched | None = None
        self._is_changed, self._too_long, self._is_refused = bool(now), list[str](), False
        # How many were drawn in this epoch, and their checksum: DataLoader's workers are ahead of the training.
        self._total = self._order = self._compared = 0
        self._began: dict[str, Any] = {}
        self._ready: Iterator[Any] | None = None
        self.drawn.clear()

    def draw(self) -> None:
        """Draw the first indices of the next iterator now. Raises RuntimeError if they are others than `now` has."""
        count, streams, now = self._count, self._streams, self._now
        self._count, self._now = 0, {}
        self._began = own_states(self._roots())
        inner = self._drawing(streams)
        self.skipped = order = checksum_of(itertools.islice(inner, count))
        ahead = [*itertools.islice(inner, now["drawn"] - count)] if now else []
        if now:
            order = checksum_of(ahead, order)
            if order != now["order"]:
                raise RuntimeError(
                    f"{self.names} draws another order than the process before: samples would come "
                    f"twice or never. {WAY_OUT}"
                )
            set_own_states(self._roots(), now["own"])
        self._total, self._order = count, self.skipped
        self._ready = itertools.chain(ahead, [] if ahead else [*itertools.islice(inner, 1)], inner)
        self._watched = Watched(self._roots())

    def _drawing(self, streams: Streams | None) -> Iterator[Any]:
        return iter(self.inner) if streams is None else streams.drawing(lambda: iter(self.inner))

    def __iter__(self) -> Iterator[Any]:
        # Not before the first index is taken: with workers DataLoader makes two iterators, and drops the first.
        if self._ready is None:
            self.draw()
        assert self._ready is not None
        ready, self._ready = self._ready, None
        order, key, apart = self.skipped, self._key, self._apart
        self._key = self._apart = None
        for number, indices in enumerate(ready, self._total):
            # What the sampler changes as it draws does not count; torch's change nothing.
            if self._watched and not self._is_torchs:
                self._watched.note()
            order = checksum_of([indices], order)
            self._total, self._order = self._total + 1, order
            self.drawn.append(order)
            if apart is not None and key is not None:
                apart.begin(key << 32 | number)
            yield indices if key is None else _with_key(key, number, indices)
            self._look()

    def _look(self) -> None:
        """See whether the program has changed something since the last draw."""
        if self._watched and (changed := self._watched.changed()):
            self._is_changed, self._too_long = True, self._too_long or self._watched.too_long(changed)
            # torch's SubsetRandomSampler draws from them until the epoch's end.
            self._is_refused |= self._total < len(self) and any(place.endswith(".indices") for place in changed)

    def changed(self) -> dict[str, Any]:
        """What `prepare` needs if the program, and not the sampler, has changed it since the epoch began; else {}.

        Raises NotRestorable.
        """
        self._look()
        if not self._is_changed:
            return {}
        if self._too_long:
            raise NotRestorable(
                f"{some(self._too_long)} of a sampler changed within an epoch, and is too long to be kept: a restart "
                f"would bring back the old values. {WAY_OUT}"
            )
        state: dict[str, Any] = {"drawn": self._total, "order": self._order, "own": own_states(self._roots())}
        if self._total > 2 * self._compared and self._streams is not None:
            self._compared = self._total
            self._is_refused |= self._drawn_again() != self._order
            set_own_states(self._roots(), state["own"])
        if self._is_refused:
            raise NotRestorable(
                f"the program has changed {self.names} within an epoch, which then draws otherwise in the same epoch: "
                "a restart could not draw that order again. Let the sampler draw a whole epoch in __iter__, before it "
                "returns the first index, or change it after the epoch's last batch"
            )
        return state

    def _drawn_again(self) -> int:
        """The checksum of all indices of this epoch so far, drawn as a restart draws them."""
        assert self._streams is not None
        set_own_states(self._roots(), self._began)
        return checksum_of(itertools.islice(self._drawing(self._streams.again()), self._total))

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
