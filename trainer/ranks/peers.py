"""The ranks of a group to each other: values, agreements and copies of tensors, whatever the group's backend.

Small values go along a tree, so a rank has few connections: a leaf of the tree has one. Rank 0 is the root. A rank's
parent has the same number in base 8 with its last digit that is not 0 set to 0. So the ranks below a rank are the ones
that follow it, and with 8 ranks per node 7 of 8 connections stay within a node.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import itertools
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.ranks.connections import Bytes, Connections, PeerLost
from elaunch.trainer.ranks.meeting import StoreContacts
from elaunch.trainer.state.region import MARK

Value = TypeVar("Value")
_HEAD = struct.Struct("<BQ")
_LENGTH = struct.Struct("<Q")
# With 16,384 ranks the depth is 5 and rank 0 has 31 children. A smaller number makes the tree deeper, which
# takes longer; a larger one lets more ranks wait for the root.
FAN_OUT = 8


class _Kind(IntEnum):
    """The kind of a message: ranks that call different methods get an error, not each other's bytes."""

    COLLECTED = 1
    SPREAD = 2
    SCATTERED = 3
    LARGEST = 4
    REGION = 5


class Peers:
    """This process among the ranks of `group`, by default the job's. Without a process group it is the only rank.

    The ranks speak over TCP connections of their own, which they make when they first speak. The group is used for its
    store alone. The methods from `from_rank_0` to `fill_from_rank_0` are collectives: all ranks call them, in the same
    order, and if a rank dies they raise PeerLost on all others. Call them from one thread only, the first one from the
    training thread; for another thread there is `apart`. What a rank sends must be trusted: values are pickled.

    For each `send` of a region the receiver calls `length_from` and `receive`. A region that several ranks need goes
    along a chain of them: each receives it and passes it on to the next (`pass_on`), so that n receivers take one
    transfer's time, not n times that.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        # This does not have the group itself: who holds it keeps its threads alive.
        self.rank, self.world_size, self._group_name, self._timeout_s = 0, 1, "", 0.0
        if dist.is_available() and dist.is_initialized():
            group = group or dist.group.WORLD
            assert group is not None
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            self._group_name, self._timeout_s = group.group_name, _timeout_s(group)
        self._purpose = "ranks"
        self._opened: Connections | None = None
        self._apart: weakref.WeakSet[Peers] = weakref.WeakSet()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def apart(self, purpose: str) -> Peers:
        """The same ranks, with connections of their own, for another thread. All ranks use them in the same order."""
        other = copy.copy(self)
        other._purpose, other._opened, other._apart = purpose, None, weakref.WeakSet()
        self._apart.add(other)
        return other

    def meet(self, ranks: Sequence[int] = (), *, patient: bool = False) -> None:
        """Connect to these ranks, which do the same, or without any to the neighbours in the tree.

        Then another thread can use this: it will not ask the store, where a thread that waits holds up others. With
        `patient` a rank is waited for as long as it lives from then on.
        """
        # A parent may have sent its last message, and left.
        self._connections.meet(ranks or self._around, waiting=ranks or self._children, patient=patient)

    def close(self) -> None:
        """Close the connections, and those of `apart`: the threads that use them are done.

        The others get an error if they still wait for this rank.
        """
        for other in list(self._apart):
            other.close()
        if self._opened is not None:
            self._opened.close()

    def from_rank_0(self, value: Value | None) -> Value:
        """Rank 0's value, on every rank; the values of other ranks are ignored."""
        found: Any = value
        if self.world_size > 1:
            with self._or_close():
                content = self._spread(pickle.dumps(value) if self.leads else b"")
                found = value if self.leads else pickle.loads(content)
        return found  # type: ignore[no-any-return]

    def from_all(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank."""
        if self.world_size == 1:
            return [value]
        with self._or_close():
            collected = self._reduce(_Kind.COLLECTED, _joined([pickle.dumps(value)]), b"".join)
            return [pickle.loads(each) for each in _split(collected)]

    def to_rank_0(self, value: Value) -> list[Value] | None:
        """The values of all ranks, by rank, on rank 0; None on the others."""
        if self.world_size == 1:
            return [value]
        with self._or_close():
            collected = self._reduce(_Kind.COLLECTED, _joined([pickle.dumps(value)]), b"".join, is_spread=False)
            return [pickle.loads(each) for each in _split(collected)] if self.leads else None

    def each_from_rank_0(self, values: Sequence[Value] | None) -> Value:
        """The value that rank 0 has for this rank: its `values` are one for each rank; others' are ignored."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        with self._or_close():
            contents = [pickle.dumps(value) for value in values or ()]
            self.meet()
            if not self.leads:
                contents = _split(self._message(parent(self.rank), _Kind.SCATTERED, self._children))
            for child in self._children:
                ranks = below(child, self.world_size)
                theirs = _joined(contents[ranks.start - self.rank : ranks.stop - self.rank])
                self._connections.send(child, _HEAD.pack(_Kind.SCATTERED, len(theirs)), theirs)
            self._connections.flush()
            mine: Value = pickle.loads(contents[0])
            return mine

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks, which give equally many numbers."""
        numbers = struct.Struct(f"<{len(values)}q")

        def most(contents: Iterable[Bytes]) -> bytes:
            return numbers.pack(*map(max, zip(*map(numbers.unpack, contents), strict=True)))

        if self.world_size == 1:
            return [int(value) for value in values]
        found = self._reduce(_Kind.LARGEST, numbers.pack(*values), most, length=numbers.size)
        return list(numbers.unpack(found))

    def fill_from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        """Fill these tensors with rank 0's values. They are contiguous, in host memory, and alike on all ranks."""
        before, after = neighbours(range(self.world_size), self.rank)
        for content in (bytes_of(tensor.detach().view(-1).view(torch.uint8)) for tensor in tensors if tensor.numel()):
            if before is not None:
                self._head(before, _Kind.REGION, length=len(content))
                self._receive(content, before, after)
            elif after is not None:
                self._begin_send(content, after)
                self.flush()

    def begin_send(self, region: Tensor, rank: int) -> None:
        """Begin to send a region without its mark. It must not change until `flush` returns."""
        self._begin_send(_data_of(region), rank)

    def flush(self) -> None:
        """Wait until all that this rank has begun to send is sent."""
        self._connections.flush()

    def send(self, region: Tensor, rank: int) -> None:
        """Send a region without its mark, and wait until it is sent."""
        self.begin_send(region, rank)
        self.flush()

    def length_from(self, rank: int) -> int:
        """The number of bytes that `receive` will get."""
        length = self._head(rank, _Kind.REGION)
        return length + len(MARK) if length else 0

    def receive(self, region: Tensor, rank: int, *, pass_on: int | None = None) -> None:
        """Receive everything but the mark into `region`, whose length is what `length_from` returned.

        Each part is sent on to rank `pass_on` while the rest arrives.
        """
        self._receive(_data_of(region), rank, pass_on)

    def _begin_send(self, content: memoryview, rank: int) -> None:
        self._connections.send(rank, _HEAD.pack(_Kind.REGION, len(content)), content)

    def _receive(self, content: memoryview, rank: int, pass_on: int | None) -> None:
        if pass_on is not None:
            self._connections.send(pass_on, _HEAD.pack(_Kind.REGION, len(content)))
        self._connections.receive(rank, content, pass_on=pass_on)
        if pass_on is not None:
            self.flush()

    def _spread(self, content: Bytes) -> Bytes:
        """Rank 0's content; that of others is ignored."""
        self.meet()
        if not self.leads:
            content = self._message(parent(self.rank), _Kind.SPREAD, self._children)
        for child in self._children:
            self._connections.send(child, _HEAD.pack(_Kind.SPREAD, len(content)), content)
        self._connections.flush()
        return content

    def _reduce(
        self,
        kind: _Kind,
        content: bytes,
        merge: Callable[[Iterable[Bytes]], bytes],
        *,
        is_spread: bool = True,
        length: int | None = None,
    ) -> Bytes:
        """Merge the contents of all ranks on the way to rank 0, which sends the result to all, or nothing.

        So no rank leaves before all have come, and while this waits each neighbour that closes its connection is lost.
        """
        self.meet()
        merged = merge([content, *(self._message(child, kind, self._around, length) for child in self._children)])
        if not self.leads:
            self._connections.send(parent(self.rank), _HEAD.pack(kind, len(merged)), merged)
        found = self._spread(merged if is_spread else b"")
        return merged if self.leads else found

    def _message(self, rank: int, kind: _Kind, waiting: Sequence[int], length: int | None = None) -> bytearray:
        content = bytearray(self._head(rank, kind, waiting, length))
        self._connections.receive(rank, memoryview(content), waiting=waiting)
        return content

    def _head(self, rank: int, kind: _Kind, waiting: Sequence[int] = (), length: int | None = None) -> int:
        """The length of the next message. Raises PeerLost if it is another one: nobody knows what follows."""
        head = bytearray(_HEAD.size)
        self._connections.receive(rank, memoryview(head), waiting=waiting)
        found, size = _HEAD.unpack(head)
        if found != kind or length not in (None, size):
            wanted = kind.name if length is None else f"{kind.name} of {length}"
            self._connections.close("ranks have called different collectives")
            kinds = {kind.value: kind.name for kind in _Kind}
            raise PeerLost(
                f"ranks call different collectives: rank {rank} has sent {kinds.get(found, found)} of {size}, and this "
                f"rank waits for {wanted}; all ranks must call the same ones, in the same order"
            )
        return int(size)

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        """Close the connections after an error, as of a value that cannot be pickled: the others wait for this rank."""
        try:
            yield
        except BaseException:
            self._connections.close()
            raise

    @functools.cached_property
    def _children(self) -> list[int]:
        return children(self.rank, self.world_size)

    @property
    def _around(self) -> list[int]:
        return [*self._children, *([] if self.leads else [parent(self.rank)])]

    @property
    def _connections(self) -> Connections:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Connections:
        """Connections of these ranks. All ranks of a group open theirs in the same order."""
        name = f"elaunch/{os.environ.get('ELAUNCH_GENERATION', '')}/{self._group_name}/{self._purpose}"
        name += f"/{next(_count(name))}"
        return Connections(name, self.rank, self.world_size, StoreContacts(name), timeout_s=self._timeout_s)


@functools.cache
def _count(name: str) -> Iterator[int]:
    return itertools.count()


def _timeout_s(group: Any) -> float:
    """How long a rank of the group is waited for: as long as gloo would wait, in this group or in a new one."""
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [each._timeout for each in options if hasattr(each, "_timeout")]
    if not limits or "gloo" not in dist.get_backend_config(group):
        # A GPU's collectives are short. What is agreed here may take a checkpoint's time.
        limits.append(dist.distributed_c10d.default_pg_timeout)
    return float(max(limits).total_seconds())


def parent(rank: int) -> int:
    """The next rank on the way to rank 0, which has none."""
    return rank - rank // _unit(rank) % FAN_OUT * _unit(rank)


def children(rank: int, world_size: int) -> list[int]:
    """In ascending order. The ranks below a child are it and those that follow it, up to the next child."""
    unit = 1
    found: list[int] = []
    while rank + unit < world_size and (not rank or unit < _unit(rank)):
        found += range(rank + unit, min(rank + FAN_OUT * unit, world_size), unit)
        unit *= FAN_OUT
    return found


def below(rank: int, world_size: int) -> range:
    """The rank itself, and all ranks that get rank 0's messages through it."""
    return range(rank, min(rank + _unit(rank), world_size) if rank else world_size)


def _unit(rank: int) -> int:
    """The power of FAN_OUT of the last digit that is not 0."""
    unit = 1
    while not rank // unit % FAN_OUT:
        unit *= FAN_OUT
    return unit


def neighbours(chain: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """The ranks before and after `rank` in a chain; None at its ends."""
    place = chain.index(rank)
    return (chain[place - 1] if place else None), (chain[place + 1] if place + 1 < len(chain) else None)


def bytes_of(tensor: Tensor) -> memoryview:
    """They are valid as long as the tensor is. It is contiguous. No NumPy is needed, which torch can do without."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _data_of(region: Tensor) -> memoryview:
    return bytes_of(region)[len(MARK) :]


def _joined(contents: Iterable[bytes]) -> bytes:
    return b"".join(part for content in contents for part in (_LENGTH.pack(len(content)), content))


def _split(joined: Bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(joined):
        (length,) = _LENGTH.unpack_from(joined, at)
        at += _LENGTH.size
        found.append(bytes(joined[at : at + length]))
        at += length
    return found
