"""A loader's sampler that leaves out what is done, and notices what the program changes of it."""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

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

# What a sampler may do.
WAY_OUT = (
    "Let the sampler draw from random, numpy.random, torch, or a generator that is an attribute of it. A list that is "
    "changed in place may have 8192 numbers, a tensor or an array 262144; a sampler shuffles a copy of a longer one"
)


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
