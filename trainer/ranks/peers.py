"""Communication between the ranks of a group, on any backend: values, agreements and copies of tensors.

Small values travel along a tree with rank 0 as its root, so a rank has few connections, and a leaf one. A rank's parent
has the same number in base 8 with the last nonzero digit set to 0. So the descendants of a rank are the ones that
follow it, and with 8 ranks per node 7 of 8 connections stay within a node.
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
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.ranks.connections import Bytes, Connections, PeerLost
from elaunch.trainer.ranks.handshake import StoreContacts
from elaunch.trainer.state.region import MARK

Value = TypeVar("Value")
_HEAD = struct.Struct("<BQ")
# With 16,384 ranks the depth is 5 and rank 0 has 31 children. A smaller number makes the tree deeper, which
# takes longer; a larger one lets more ranks wait for the root.
FAN_OUT = 8


def empty_bytes(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8)


class _Kind(IntEnum):
    """The kind of a message: ranks that call different methods get an error, not each other's bytes."""

    GATHER = 1
    BROADCAST = 2
    MAX = 3
    REGION = 4


class Peers:
    """This process among the ranks of `group`, by default the job's. Without a process group it is the only rank.

    The ranks communicate over their own TCP connections, made at the first use. The group is used only for its store.
    The methods from `broadcast` to `broadcast_tensors` are collectives: all ranks call them, in the same order, and if
    a rank dies they raise PeerLost on all others. Call them from one thread only, the first one from the training
    thread; for another thread use `apart`. What a rank sends must be trusted: values are pickled.

    For each `begin_send` of a region the receiver calls `length_from` and `receive`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        # Not the group itself: a reference to it would keep its threads alive.
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
        """Connect to these ranks, by default the neighbours in the tree, which do the same.

        Then another thread can use this: it does not query the store, where a waiting thread blocks others. With
        `patient` later waits have no timeout: they last while the rank lives.
        """
        # A parent may have sent its last message, and left.
        self._connections.meet(ranks or self._around, waiting=ranks or self._children, patient=patient)

    def close(self) -> None:
        """Close the connections, and those of `apart`, whose threads must be done.

        The others get an error if they still wait for this rank.
        """
        for other in list(self._apart):
            other.close()
        if self._opened is not None:
            self._opened.close()

    def broadcast(self, value: Value | None) -> Value:
        """Rank 0's value, on every rank; the values of other ranks are ignored."""
        found: Any = value
        if self.world_size > 1:
            with self._or_close():
                content = self._broadcast(pickle.dumps(value) if self.leads else b"")
                found = value if self.leads else pickle.loads(content)
        return found  # type: ignore[no-any-return]

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank."""
        return self._reduce(_Kind.GATHER, [value], _joined)

    def gather(self, value: Value) -> list[Value] | None:
        """The values of all ranks, by rank, on rank 0; None on the others."""
        found = self._reduce(_Kind.GATHER, [value], _joined, is_broadcast=False)
        return found if self.leads else None

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks, which pass equally many numbers."""
        return self._reduce(_Kind.MAX, [*map(int, values)], lambda rows: [*map(max, zip(*rows, strict=True))])

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Fill these tensors with rank 0's values. They are contiguous, in host memory, and alike on all ranks."""
        before, after = _neighbours(range(self.world_size), self.rank)
        for content in (bytes_of(tensor.detach().view(-1).view(torch.uint8)) for tensor in tensors if tensor.numel()):
            if before is not None:
                self._head(before, _Kind.REGION)
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

    def length_from(self, rank: int) -> int:
        """The length of the region for `receive`, with its mark."""
        length = self._head(rank, _Kind.REGION)
        return length + len(MARK) if length else 0

    def receive(self, region: Tensor, rank: int, *, pass_on: int | None = None) -> None:
        """Receive everything but the mark into `region`, whose length is what `length_from` returned.

        Each part is sent on to rank `pass_on` while the rest arrives.
        """
        self._receive(_data_of(region), rank, pass_on)

    def relay(
        self, chain: Sequence[int], region: Tensor | None, allocate: Callable[[int], Tensor] = empty_bytes
    ) -> tuple[Tensor, int] | None:
        """Send the first rank's `region` along a chain of ranks: each passes it on to the next while it arrives.

        So n receivers take one transfer's time, not n times that. Returns what has arrived at this rank, in memory of
        `allocate` and without its mark, and from which rank; None on the first rank and outside of the chain.
        """
        if self.rank not in chain or len(chain) == 1:
            return None
        before, after = _neighbours(chain, self.rank)
        if before is None:
            assert after is not None
            assert region is not None
            self.begin_send(region, after)
            self.flush()
            return None
        taken = allocate(self.length_from(before))
        self.receive(taken, before, pass_on=after)
        return taken, before

    def _begin_send(self, content: memoryview, rank: int) -> None:
        self._connections.send(rank, _HEAD.pack(_Kind.REGION, len(content)), content)

    def _receive(self, content: memoryview, rank: int, pass_on: int | None) -> None:
        if pass_on is not None:
            self._connections.send(pass_on, _HEAD.pack(_Kind.REGION, len(content)))
        self._connections.receive(rank, content, pass_on=pass_on)
        if pass_on is not None:
            self.flush()

    def _broadcast(self, content: Bytes) -> Bytes:
        """Rank 0's content; that of others is ignored."""
        self.meet()
        if not self.leads:
            content = self._message(parent(self.rank), _Kind.BROADCAST, self._children)
        for child in self._children:
            self._connections.send(child, _HEAD.pack(_Kind.BROADCAST, len(content)), content)
        self._connections.flush()
        return content

    def _reduce(
        self,
        kind: _Kind,
        value: list[Value],
        merge: Callable[[list[list[Value]]], list[Value]],
        *,
        is_broadcast: bool = True,
    ) -> list[Value]:
        """Merge the values of all ranks up the tree; rank 0 broadcasts the result, or an empty message.

        So no rank returns before all have called it, and a neighbour that closes its connection meanwhile is lost.
        """
        if self.world_size == 1:
            return value
        with self._or_close():
            self.meet()
            of_children = [pickle.loads(self._message(child, kind, self._around)) for child in self._children]
            content = pickle.dumps(merge([value, *of_children]))
            if not self.leads:
                self._connections.send(parent(self.rank), _HEAD.pack(kind, len(content)), content)
            found = self._broadcast(content if is_broadcast else b"")
            merged: list[Value] = pickle.loads(found if is_broadcast else content)
            return merged

    def _message(self, rank: int, kind: _Kind, waiting: Sequence[int]) -> bytearray:
        content = bytearray(self._head(rank, kind, waiting))
        self._connections.receive(rank, memoryview(content), waiting=waiting)
        return content

    def _head(self, rank: int, kind: _Kind, waiting: Sequence[int] = ()) -> int:
        """The length of the next message. Raises PeerLost if its kind is another: what follows is unknown."""
        head = bytearray(_HEAD.size)
        self._connections.receive(rank, memoryview(head), waiting=waiting)
        found, size = _HEAD.unpack(head)
        if found != kind:
            self._connections.close("ranks have called different collectives")
            kinds = {kind.value: kind.name for kind in _Kind}
            raise PeerLost(
                f"ranks call different collectives: rank {rank} has sent {kinds.get(found, found)} of {size}, and this "
                f"rank waits for {kind.name}; all ranks must call the same ones, in the same order"
            )
        return int(size)

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        """Close the connections after an error, such as in pickling: the others wait for this rank."""
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
    """The timeout for a rank of the group: that of gloo, in this group or in a new one."""
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [each._timeout for each in options if hasattr(each, "_timeout")]
    if not limits or "gloo" not in dist.get_backend_config(group):
        # NCCL's timeout may be short. An agreement here may take as long as a checkpoint.
        limits.append(dist.distributed_c10d.default_pg_timeout)
    return float(max(limits).total_seconds())


def parent(rank: int) -> int:
    """The next rank on the way to rank 0, which has none."""
    return rank - rank // _unit(rank) % FAN_OUT * _unit(rank)


def children(rank: int, world_size: int) -> list[int]:
    """The children in ascending order. A child's subtree is it and the ranks up to the next child."""
    unit = 1
    found: list[int] = []
    while rank + unit < world_size and (not rank or unit < _unit(rank)):
        found += range(rank + unit, min(rank + FAN_OUT * unit, world_size), unit)
        unit *= FAN_OUT
    return found


def _unit(rank: int) -> int:
    """The place value of the last nonzero digit in base FAN_OUT."""
    unit = 1
    while not rank // unit % FAN_OUT:
        unit *= FAN_OUT
    return unit


def _neighbours(chain: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """The ranks before and after `rank` in a chain; None at its ends."""
    place = chain.index(rank)
    return (chain[place - 1] if place else None), (chain[place + 1] if place + 1 < len(chain) else None)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, valid as long as it is. Works without NumPy, as torch does."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _data_of(region: Tensor) -> memoryview:
    return bytes_of(region)[len(MARK) :]


def _joined(lists: list[list[Value]]) -> list[Value]:
    return list(itertools.chain.from_iterable(lists))
