"""An `Order` at work: streams that are read by index, seeded datasets, and a step's micro-batches one by one."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from elaunch.trainer.data.order import BatchSampler, Micro, Order, Samples

Sample = TypeVar("Sample")


class Sized(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream(IterableDataset[Any]):
    """One rank's micro-batches from a stream, for `DataLoader(stream, batch_size=None, num_workers=…)`.

    `source` is any iterable with the same samples in the same order at each iteration; sample i of an epoch is its i-th
    item. Each DataLoader worker reads its own part of the rank's micro-batches, and the loader returns them in order,
    so the number of workers changes nothing. Samples that a process does not need are read and dropped, unless `source`
    has `seek(index)`: that is called before `iter(source)`, which must then begin at that sample. If `source` has
    `set_epoch(epoch)`, that is called first. `collate` makes a batch from a list of samples.

    With a `block` in `order`, a process buffers the samples that it needs from one block. Nothing else is buffered, and
    no position is saved: the position is the last complete step, `after`.
    """

    def __init__(
        self,
        source: Iterable[Sample],
        order: Order,
        rank: int,
        world_size: int,
        *,
        after: int = 0,
        until: int | None = None,
        collate: Callable[[list[Sample]], Any] = default_collate,
    ) -> None:
        if order.shuffle and order.block is None:
            raise ValueError("a stream cannot be shuffled as a whole; give Order block=N, or shuffle=False")
        if order.tail == "short":
            raise ValueError('a stream cannot have tail="short"; use "carry" or "drop"')
        self._source, self._order, self._collate = source, order, collate
        self._batches: BatchSampler = order.batches(rank, world_size, after=after, until=until)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # DataLoader takes its batches from the workers in turn.
        mine = itertools.islice(self._batches.places(), first, None, stride)
        spans, again = itertools.tee(self._order.loaded(step, micro) for step, micro in mine)
        samples = self._read(itertools.chain.from_iterable(spans))
        for span in again:
            yield self._collate(list(itertools.islice(samples, len(span))))

    def _read(self, positions: Iterator[int]) -> Iterator[Any]:
        """The samples at these ascending positions. All samples of a block are read together, in the source's order."""
        reader = _StreamReader(self._source, self._order.size)
        for (epoch, _), block in itertools.groupby(positions, key=self._block_of):
            ids = [self._order.sample(position) for position in block]
            held = {index: reader.read(epoch, index) for index in sorted(ids)}
            for index in ids:
                yield held.pop(index)

    def _block_of(self, position: int) -> tuple[int, int]:
        """Epoch and block of a position. Without shuffling each sample is its own block."""
        size = self._order.size
        epoch, index = (0, position) if size is None else divmod(position, size)
        return epoch, index // (self._order.block or 1)


class _StreamReader:
    """Reads samples of `source` by epoch and index, which must ascend."""

    def __init__(self, source: Iterable[Any], size: int | None) -> None:
        self._source, self._size = source, size
        self._items: Iterator[Any] = iter(())
        self._epoch, self._next = -1, 0

    def read(self, epoch: int, index: int) -> Any:
        """Sample `index` of `epoch`. Raises RuntimeError if the source ends before it."""
        can_seek = hasattr(self._source, "seek")
        if epoch != self._epoch or (can_seek and index != self._next):
            self._begin(epoch, index if can_seek else 0)
        for item in self._items:
            self._next += 1
            if self._next > index:
                return item
        told = "it has no size" if self._size is None else f"its size is said to be {self._size}"
        raise RuntimeError(
            f"the stream ended after {self._next} samples, and {told}; give Order(size={self._next}), and it is read "
            "again for each epoch"
        )

    def _begin(self, epoch: int, index: int) -> None:
        if epoch != self._epoch and hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        if hasattr(self._source, "seek"):
            self._source.seek(index)
        self._items, self._epoch, self._next = iter(self._source), epoch, index


class Seeded(Dataset[Any]):
    """A map-style dataset whose own randomness (augmentation) is the same at any world size and after any restart.

    While a micro-batch of `Order.batches` is read, `random`, numpy's global generator (if numpy is imported) and
    torch's CPU generator are seeded with the micro-batch's key. Afterwards their states are restored.
    """

    def __init__(self, dataset: Sized) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, ids: list[int]) -> list[Any]:
        """DataLoader calls this with the ids of one batch."""
        if not isinstance(ids, Samples):
            raise TypeError("Seeded needs the keys of Order.batches(); give them to DataLoader as batch_sampler")
        with _seeded(ids.key):
            if hasattr(self._dataset, "__getitems__"):
                return cast("list[Any]", self._dataset.__getitems__(ids))
            return [self._dataset[index] for index in ids]


def seed(key: int) -> None:
    """Seed `random`, numpy's global generator (if numpy is imported) and torch's CPU generator."""
    random.seed(key)
    torch.default_generator.manual_seed(key)
    if numpy := sys.modules.get("numpy"):
        # numpy takes seeds as numbers of 32 bits.
        numpy.random.seed([key & 0xFFFFFFFF, key >> 32])


@contextlib.contextmanager
def _seeded(key: int) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    before = random.getstate(), torch.default_generator.get_state(), numpy.random.get_state() if numpy else None
    seed(key)
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.default_generator.set_state(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def accumulate(
    model: nn.Module, order: Order, step: int, rank: int | None = None, world_size: int | None = None
) -> Iterator[Micro]:
    """This rank's micro-batches of `step`, one after the other, for forward and backward of each in the loop's body:

        for micro in accumulate(model, order, step):
            (loss(model(inputs), targets) * micro.weight).backward()

    `loss` must be a mean over the micro-batch's samples. torch's generators on CPU and CUDA are seeded with the
    micro-batch's key, so dropout masks do not depend on the world size. Only the last backward sums gradients over the
    ranks: it uses `no_sync()` of DDP and FSDP, or `set_requires_gradient_sync` of FSDP2. `rank` and `world_size`
    default to those of the process group; without a group the process is alone. Raises ValueError if the ranks of FSDP
    would run different numbers of forward passes, since they would wait for each other forever.
    """
    if rank is None or world_size is None:
        grouped = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    if _is_sharded(model) and not order.even and order.micro_batches % world_size:
        raise ValueError(
            f"{world_size} workers cannot share {order.micro_batches} micro-batches evenly, and each forward pass of "
            "FSDP needs all of them; give Order even=True"
        )
    for micro in order.parts(step, rank, world_size):
        seed_torch(micro.key)
        with contextlib.nullcontext() if micro.is_last else _without_sync(model):
            yield micro


def seed_torch(key: int) -> None:
    """Seed torch's generators, as `torch.manual_seed` does.

    That one takes a stack for each kind of device that is not there, which is most of its time.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.default_generator.manual_seed(key)
        torch.cuda.manual_seed_all(key)
    elif torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(key)
    else:
        torch.manual_seed(key)


@contextlib.contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            yield


def _is_sharded(model: nn.Module) -> bool:
    # FSDP2's modules have the method. FSDP1 is recognised by name, since importing it would take long.
    return hasattr(model, "set_requires_gradient_sync") or type(model).__name__ == "FullyShardedDataParallel"
