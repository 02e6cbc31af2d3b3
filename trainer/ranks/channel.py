"""Collectives on bytes and numbers between the ranks of a group, and regions of memory from one rank to another.

They go over connections of this channel alone (`connections`), small values along a tree, large ones along a chain of
all ranks. So a rank has few connections: a leaf of the tree has one.

Rank 0 is the tree's root. A rank's parent has the same number in base 8 with its last digit that is not 0 set to 0. So
the ranks below a rank are the ones that follow it, and with 8 ranks per node 7 of 8 connections stay within a node.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

from elaunch.trainer.ranks.connections import Bytes, Connections, PeerLost
from elaunch.trainer.ranks.handshake import Contacts

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
    CHAINED = 6


class Channel:
    """A channel of `rank` among `world_size` ranks. `name` and `contacts` are the same on all of them.

    `gather`, `broadcast`, `scatter`, `largest` and `pass_down` are collectives: all ranks call them, in the same order.
    If a rank dies, these raise PeerLost on all others. For each `begin_send` the receiver calls `length_from` and
    `receive_into`. Use a channel from one thread at a time.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, contacts: Contacts, *, timeout_s: float | None = None
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._connections = Connections(name, rank, world_size, contacts, timeout_s=timeout_s)
        self._parent, self._children = parent(rank), children(rank, world_size)
        self._around = [*self._children, *([] if self._parent is None else [self._parent])]

    def close(self) -> None:
        self._connections.close()

    def meet(self, ranks: Iterable[int] = (), *, patient: bool = False) -> None:
        """Connect to these ranks, which do the same; without any to the neighbours in the tree.

        Then another thread can use the channel: it will not ask the store, where a thread that waits holds up others.
        With `patient` a rank is waited for as long as it lives from then on.
        """
        self._connections.meet([*ranks] or self._around, patient=patient)

    def gather(self, content: bytes) -> list[bytes] | None:
        """All ranks' contents by rank, on rank 0; None on the others."""
        collected = self._up(_Kind.COLLECTED, _joined([content]), b"".join, goes_on=False)
        return None if collected is None else _split(collected)

    def all_gather(self, content: bytes) -> list[bytes]:
        """All ranks' contents, by rank."""
        return _split(self.broadcast(self._up(_Kind.COLLECTED, _joined([content]), b"".join, goes_on=True)))

    def broadcast(self, content: Bytes | None) -> Bytes:
        """Rank 0's content; that of others is ignored."""
        if self._parent is not None:
            content = self._message(self._parent, _Kind.SPREAD, waiting=self._children)
        assert content is not None
        message = _HEAD.pack(_Kind.SPREAD, len(content)), content
        self._send_down(lambda _: message)
        return content

    def scatter(self, contents: Sequence[bytes] | None) -> bytes:
        """The content that rank 0 has for this rank; `contents` of others are ignored."""
        if self._parent is not None:
            contents = _split(self._message(self._parent, _Kind.SCATTERED, waiting=self._children))
        assert contents is not None
        own = contents

        def parts(child: int) -> tuple[Bytes, ...]:
            ranks = below(child, self._world_size)
            theirs = _joined(own[ranks.start - self._rank : ranks.stop - self._rank])
            return _HEAD.pack(_Kind.SCATTERED, len(theirs)), theirs

        self._send_down(parts)
        return own[0]

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks, which give equally many numbers."""
        numbers = struct.Struct(f"<{len(values)}q")

        def most(contents: Iterable[Bytes]) -> bytes:
            return numbers.pack(*map(max, zip(*map(numbers.unpack, contents), strict=True)))

        found = self._up(_Kind.LARGEST, numbers.pack(*values), most, goes_on=True, length=numbers.size)
        return list(numbers.unpack(self.broadcast(found)))

    def pass_down(self, region: memoryview) -> None:
        """Fill `region`, which is equally long on all ranks, with rank 0's.

        It goes along a chain of all ranks: so each rank sends it once, and most of them to their own node.
        """
        following = None if self._rank + 1 == self._world_size else self._rank + 1
        head = bytearray(_HEAD.pack(_Kind.CHAINED, len(region)))
        if self._rank:
            self._read(self._rank - 1, head, pass_on=following)
            self._require(self._rank - 1, head, _Kind.CHAINED, len(region))
            self._connections.receive(self._rank - 1, region, waiting=_some(following), pass_on=following)
        elif following is not None:
            self._connections.send(following, head, region)
        self._connections.flush()

    def begin_send(self, rank: int, region: memoryview) -> None:
        """Begin to send; the region must not change until `flush` returns. `receive_into` goes on with it as well."""
        self._connections.send(rank, _HEAD.pack(_Kind.REGION, len(region)), region)

    def flush(self) -> None:
        """Wait until all that this rank has begun to send is sent."""
        self._connections.flush()

    def length_from(self, rank: int) -> int:
        """The length of the region that this rank sends next."""
        head = bytearray(_HEAD.size)
        self._read(rank, head)
        self._require(rank, head, _Kind.REGION)
        return int(_HEAD.unpack(head)[1])

    def receive_into(self, region: memoryview, rank: int, *, pass_on: int | None = None) -> None:
        """Receive the region that `length_from` has announced, and send it on to rank `pass_on` while it arrives."""
        if pass_on is not None:
            self._connections.send(pass_on, _HEAD.pack(_Kind.REGION, len(region)))
        self._connections.receive(rank, region, waiting=_some(pass_on), pass_on=pass_on)
        if pass_on is not None:
            self._connections.flush()

    def _up(
        self,
        kind: _Kind,
        content: bytes,
        merge: Callable[[Iterable[Bytes]], bytes],
        *,
        goes_on: bool,
        length: int | None = None,
    ) -> bytes | None:
        """Merge the contents of this rank and those below, and send them up; all ranks' on rank 0, None on the others.

        `goes_on` says that the ranks wait for something afterwards. Otherwise each may leave when it has sent.
        """
        parts: list[Bytes] = [content]
        for number, child in enumerate(self._children):
            waiting = self._around if goes_on else self._around[number + 1 :]
            parts.append(self._message(child, kind, waiting, length))
        merged = merge(parts)
        if self._parent is None:
            return merged
        head = _HEAD.pack(kind, len(merged))
        self._connections.send(self._parent, head, merged, waiting=self._children if goes_on else ())
        self._connections.flush()
        return None

    def _send_down(self, parts: Callable[[int], Sequence[Bytes]]) -> None:
        """Send each child its parts. Those that have none yet wait for them, and must not die unnoticed."""
        # The largest part of the tree first.
        for number, child in reversed([*enumerate(self._children)]):
            self._connections.send(child, *parts(child), waiting=self._children[:number])
        self._connections.flush()

    def _message(self, rank: int, kind: _Kind, waiting: Sequence[int], length: int | None = None) -> bytearray:
        head = bytearray(_HEAD.size)
        self._read(rank, head, waiting)
        self._require(rank, head, kind, length)
        content = bytearray(_HEAD.unpack(head)[1])
        self._read(rank, content, waiting)
        return content

    def _read(self, rank: int, into: bytearray, waiting: Sequence[int] = (), *, pass_on: int | None = None) -> None:
        self._connections.receive(rank, memoryview(into), waiting=waiting or _some(pass_on), pass_on=pass_on)

    def _require(self, rank: int, head: bytearray, kind: _Kind, length: int | None = None) -> None:
        """Raise PeerLost if it is another message: nobody knows what follows."""
        found, size = _HEAD.unpack_from(head)
        if found != kind or length not in (None, size):
            wanted = kind.name if length is None else f"{kind.name} of {length}"
            self._connections.close("ranks have called different collectives")
            kinds = {kind.value: kind.name for kind in _Kind}
            raise PeerLost(
                f"ranks call different collectives: rank {rank} has sent {kinds.get(found, found)} of {size}, and this "
                f"rank waits for {wanted}; all ranks must call the same ones, in the same order"
            )


def _some(rank: int | None) -> Sequence[int]:
    return () if rank is None else (rank,)


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


def parent(rank: int) -> int | None:
    """None for rank 0."""
    if not rank:
        return None
    unit = _unit(rank)
    return rank - rank // unit % FAN_OUT * unit


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
