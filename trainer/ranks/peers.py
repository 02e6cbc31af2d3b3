"""The ranks of a group to each other: values, agreements and copies of tensors, whatever the group's backend."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import pickle
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.ranks.channel import Channel
from elaunch.trainer.ranks.meeting import GroupMember
from elaunch.trainer.state.region import MARK

Value = TypeVar("Value")
_SKIPPED_BYTES = 1 << 20


class Peers:
    """This process among the ranks of `group`, by default the job's. Without a process group it is the only rank.

    The ranks speak over TCP connections of their own, which they make when they first speak. The group is used for its
    store alone. All methods down to `fill_from_rank_0`, but not `close`, are collectives. Call them from one thread
    only, the first one from the training thread; for another thread there is `apart`. What a rank sends must be
    trusted: values are pickled.

    For each `send` of a region the receiver calls `length_from` and `receive`. A region that several ranks need goes
    along a chain of them: each receives it and passes it on to the next (`pass_on`), so that n receivers take one
    transfer's time, not n times that.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._member = GroupMember.of(group) if dist.is_available() and dist.is_initialized() else GroupMember()
        self.rank, self.world_size = self._member.rank, self._member.world_size
        self._purpose = "ranks"
        self._opened: Channel | None = None
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
        """Connect to these ranks, which do the same, or without any to those that the collectives need.

        Call it in the training thread before another one uses this. With `patient` a rank is waited for as long as it
        lives from then on.
        """
        if self.world_size > 1:
            self._channel.meet(ranks, patient=patient)

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
                content = self._channel.broadcast(pickle.dumps(value) if self.leads else None)
                found = value if self.leads else pickle.loads(content)
        return found  # type: ignore[no-any-return]

    def from_all(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank."""
        if self.world_size <= 1:
            return [value]
        with self._or_close():
            return [pickle.loads(each) for each in self._channel.all_gather(pickle.dumps(value))]

    def to_rank_0(self, value: Value) -> list[Value] | None:
        """The values of all ranks, by rank, on rank 0; None on the others."""
        if self.world_size <= 1:
            return [value]
        with self._or_close():
            collected = self._channel.gather(pickle.dumps(value))
            return None if collected is None else [pickle.loads(each) for each in collected]

    def each_from_rank_0(self, values: Sequence[Value] | None) -> Value:
        """The value that rank 0 has for this rank: its `values` are one for each rank; others' are ignored."""
        if self.world_size <= 1:
            assert values is not None
            return values[0]
        with self._or_close():
            contents = None if values is None else [pickle.dumps(value) for value in values]
            mine: Value = pickle.loads(self._channel.scatter(contents))
            return mine

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks."""
        return self._channel.largest(values) if self.world_size > 1 else [int(value) for value in values]

    def fill_from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        """Fill these tensors with rank 0's values. They are contiguous, in host memory, and alike on all ranks."""
        for tensor in tensors if self.world_size > 1 else ():
            if tensor.numel():
                self._channel.pass_down(bytes_of(tensor.detach().view(-1).view(torch.uint8)))

    def begin_send(self, region: Tensor, rank: int) -> None:
        """Begin to send a region without its mark. It must not change until `flush` returns."""
        self._channel.begin_send(rank, _data_of(region))

    def flush(self) -> None:
        """Wait until all that this rank has begun to send is sent."""
        self._channel.flush()

    def send(self, region: Tensor, rank: int) -> None:
        """Send a region without its mark, and wait until it is sent."""
        self.begin_send(region, rank)
        self.flush()

    def length_from(self, rank: int) -> int:
        """The number of bytes that `receive` will get."""
        length = self._channel.length_from(rank)
        return length + len(MARK) if length else 0

    def receive(self, region: Tensor, rank: int, *, pass_on: int | None = None) -> None:
        """Receive everything but the mark into `region`, whose length is what `length_from` returned.

        Each part is sent on to rank `pass_on` while the rest arrives.
        """
        self._channel.receive_into(_data_of(region), rank, pass_on=pass_on)

    def skip(self, length: int, rank: int) -> None:
        """Receive what `length_from` has told, and keep nothing of it."""
        left = length - len(MARK)
        buffer = memoryview(bytearray(min(left, _SKIPPED_BYTES)))
        while left:
            part = buffer[: min(left, len(buffer))]
            self._channel.receive_into(part, rank)
            left -= len(part)

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        """Close the connections after an error, as of a value that cannot be pickled: the others wait for this rank."""
        channel = self._channel
        try:
            yield
        except BaseException:
            channel.close()
            raise

    @property
    def _channel(self) -> Channel:
        if self._opened is None:
            self._opened = self._member.channel(self._purpose)
        return self._opened


def _data_of(region: Tensor) -> memoryview:
    return bytes_of(region)[len(MARK) :]


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
