"""TCP connections from this rank to others of its channel, each made when it is first needed.

Of two ranks the higher one connects, and the lower one listens. One thread uses them: no thread runs behind its back.
Whatever it waits for, it meanwhile lets ranks in that connect, and sends what is waiting to be sent. So two ranks that
send to each other do not wait for each other, and neither does a ring of them.

After an error all connections are closed. So the neighbours get an error too, then theirs, and at last all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from elaunch.trainer.ranks.greeting import HELLO_BYTES, REPLY_BYTES, Contact
from elaunch.trainer.ranks.own_address import own_address

# A rank says its hello at once. What has not said it by then is no rank, or comes from a host that hangs.
_HELLO_S = 5.0
# Connections that have not said it yet; of more than these the oldest is closed.
_UNKNOWN_MAX = 64
_BACKLOG = 1024
# A read takes at most this much, so that what is passed on goes out while more comes in.
_READ_BYTES = 1 << 20
# A host that is gone answers no probe. It is noticed after 30 s, unless the agent ends this process before, or the
# kernel still has something to send: it sends no probes then, and gives up after a quarter of an hour.
_IDLE_S, _PROBE_S, _PROBES = 15, 5, 3
# poll takes no more than 24 days. It is called again then.
_POLL_S_MAX = 3600.0
_IN, _OUT, _LEFT = select.POLLIN, select.POLLOUT, select.POLLRDHUP
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL

Bytes: TypeAlias = "bytes | bytearray | memoryview"


class PeerLost(RuntimeError):
    """A rank that is waited for has closed its connection, or does not answer. The connections are of no use any more.

    The message has the words by which the agent knows that another rank has failed first.
    """


class Contacts(Protocol):
    """What all ranks of a channel can read: where each rank listens."""

    def publish(self, rank: int, content: bytes) -> None:
        """Say it for all ranks."""

    def find(self, rank: int) -> bytes:
        """Wait until that rank has said it; raises RuntimeError (torch's DistError) if it does not."""


@dataclass(eq=False)
class _Connection:
    rank: int
    socket: socket.socket
    outgoing: deque[memoryview] = field(default_factory=deque)


@dataclass(eq=False)
class _Unknown:
    """A connection that has not said all of its hello yet."""

    socket: socket.socket
    until_s: float
    hello: bytes = b""


class Connections:
    """Those of rank `rank` in `channel`, whose name is the same on all ranks.

    `timeout_s` is how long it waits for a rank that does nothing; None waits as long as the rank lives. All methods
    raise PeerLost. Use them from one thread at a time.
    """

    def __init__(
        self, channel: str, rank: int, world_size: int, contacts: Contacts, *, timeout_s: float | None = None
    ) -> None:
        self._channel, self._rank, self._world_size = channel, rank, world_size
        self._contacts, self._timeout_s = contacts, timeout_s
        self._contact: Contact | None = None
        self._listener: socket.socket | None = None
        self._unknown: list[_Unknown] = []
        self._connected: dict[int, _Connection] = {}
        self._sending: set[_Connection] = set()
        self._why_closed = ""
        _all.add(self)

    def __del__(self) -> None:
        self._close_sockets()

    def close(self, why: str = "this rank has closed it") -> None:
        """Close all connections: no rank can use this channel any more."""
        self._why_closed = self._why_closed or why
        self._close_sockets()

    def meet(self, ranks: Collection[int], *, patient: bool = False) -> None:
        """Connect to all of these ranks, which do the same. Later nothing asks the store for them.

        With `patient` a rank is waited for as long as it lives from then on.
        """
        with self._or_close():
            # Downwards first: the lower rank waits for the higher one, so somebody has to begin.
            for rank in sorted(ranks):
                self._to(rank)
        if patient:
            self._timeout_s = None

    def send(self, rank: int, *parts: Bytes) -> None:
        """Begin to send. The parts must not change until `flush` returns, or anything that was sent after them has."""
        with self._or_close():
            self._queue(self._to(rank), parts)

    def flush(self) -> None:
        """Wait until everything is sent, that is, given to the kernel."""
        with self._or_close():
            while self._sending:
                self._write_all()
                if self._sending:
                    self._wait()

    def receive(
        self, rank: int, into: memoryview, *, waiting: Collection[int] = (), pass_on: int | None = None
    ) -> None:
        """Fill `into` with what that rank sends, and begin to send it to `pass_on` while it arrives.

        The ranks in `waiting` can do nothing before this rank has it: if one of them closes its connection, and nothing
        that it has sent is unread, it is lost.
        """
        with self._or_close():
            # Also those that have not connected yet: they do so meanwhile.
            source = self._to(rank, waiting)
            target = None if pass_on is None else self._to(pass_on, waiting)
            filled = 0
            while filled < len(into):
                if self._sending:
                    self._write_all()
                try:
                    count = source.socket.recv_into(into[filled : filled + _READ_BYTES])
                except BlockingIOError:
                    self._wait(source, waiting)
                    continue
                except OSError as error:
                    raise self._lost(rank, error) from error
                if not count:
                    raise self._lost(rank)
                if target is not None:
                    self._queue(target, [into[filled : filled + count]])
                filled += count

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        if self._why_closed:
            raise PeerLost(f"the ranks' channel {self._channel} is over: {self._why_closed}")
        try:
            yield
        except BaseException as error:
            # Also after an interrupt: a message that was sent in part cannot be taken back.
            self.close(str(error) or type(error).__name__)
            raise

    def _lost(self, rank: int, error: OSError | None = None, place: str = "") -> PeerLost:
        why = f" ({error.strerror or error}{place})" if error is not None else ""
        return PeerLost(f"rank {rank} is gone or has failed: connection closed by peer{why}, channel {self._channel}")

    # Connecting

    def _to(self, rank: int, waiting: Collection[int] = ()) -> _Connection:
        """The connection to that rank, which is made now if there is none."""
        found = self._connected.get(rank)
        if found is not None:
            return found
        if self._contact is None:
            self._open()
        if rank < self._rank:
            return self._connect(rank)
        while rank not in self._connected:
            self._wait(None, waiting)
        return self._connected[rank]

    def _open(self) -> None:
        """Listen for higher ranks, and tell them where."""
        address, port = "", 0
        if self._rank + 1 < self._world_size:
            address = own_address(os.environ)
            self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            self._listener.setblocking(False)
            self._listener.bind((address, 0))
            self._listener.listen(_BACKLOG)
            port = self._listener.getsockname()[1]
        self._contact = Contact(self._channel, self._rank, address, port, secrets.token_bytes(32))
        if self._listener is not None:
            self._contacts.publish(self._rank, self._contact.to_bytes())

    def _connect(self, rank: int) -> _Connection:
        contact = Contact.from_bytes(self._channel, rank, self._contacts.find(rank))
        made = _Connection(rank, socket.socket(socket.AF_INET6 if ":" in contact.address else socket.AF_INET))
        # It is closed with the others.
        self._connected[rank] = made
        _tune(made.socket)
        try:
            with contextlib.suppress(BlockingIOError):
                made.socket.connect((contact.address, contact.port))
            made.outgoing.append(memoryview(contact.hello(self._rank)))
            self._sending.add(made)
            while made.outgoing:
                self._wait()
                self._write(made)
            reply = bytearray(REPLY_BYTES)
            self.receive(rank, memoryview(reply))
        except OSError as error:
            raise self._lost(rank, error, f" at {contact.address} port {contact.port}") from error
        if reply != contact.reply(self._rank):
            raise PeerLost(f"what listens at {contact.address} port {contact.port} is not rank {rank} any more")
        return made

    def _let_in(self) -> None:
        """Take what connects, and close what says no hello."""
        assert self._listener is not None
        for _ in range(_UNKNOWN_MAX // 4):
            try:
                taken, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    # The rank that connects would wait for its answer, and this one would look at it again and again.
                    raise PeerLost(f"no other rank can connect to this one: {error.strerror}") from error
                # There is no more, or this one was given up.
                return
            _tune(taken)
            self._unknown.append(_Unknown(taken, time.monotonic() + _HELLO_S))
            if len(self._unknown) > _UNKNOWN_MAX:
                self._unknown.pop(0).socket.close()

    def _hear_unknown(self) -> bool:
        """Read the hellos. Returns whether a rank has connected."""
        now_s, still, found = time.monotonic(), [], False
        for unknown in self._unknown:
            rank = self._rank_of(unknown)
            if rank is not None:
                self._connected[rank] = _Connection(rank, unknown.socket)
                assert self._contact is not None
                self._queue(self._connected[rank], [self._contact.reply(rank)])
                found = True
            elif unknown.socket.fileno() >= 0:
                if now_s < unknown.until_s:
                    still.append(unknown)
                else:
                    unknown.socket.close()
        self._unknown = still
        if all(rank in self._connected for rank in range(self._rank + 1, self._world_size)):
            # Nobody is missing any more.
            self._close_listener()
        return found

    def _rank_of(self, unknown: _Unknown) -> int | None:
        """The rank that this is, once it has said so; its socket is closed if it is none."""
        assert self._contact is not None
        try:
            said = unknown.socket.recv(HELLO_BYTES - len(unknown.hello))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        unknown.hello += said
        if said and len(unknown.hello) < HELLO_BYTES:
            return None
        rank = self._contact.sender_of(unknown.hello) if said else None
        # A hello that was seen on the way cannot be said once more.
        if rank is None or rank in self._connected or not self._rank < rank < self._world_size:
            unknown.socket.close()
            return None
        return rank

    # Waiting

    def _wait(self, source: _Connection | None = None, waiting: Collection[int] = ()) -> None:
        """Wait until `source` has sent something, something can be sent, or a rank has connected."""
        end_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        waiting = set(waiting)
        while True:
            events = self._poll(source, waiting, end_s)
            if self._listener is not None and self._listener.fileno() in events:
                self._let_in()
            has_met = bool(self._unknown) and self._hear_unknown()
            for rank in [*waiting]:
                peer = self._connected.get(rank)
                if peer is not None and peer is not source and events.get(peer.socket.fileno(), 0) & (_LEFT | _GONE):
                    if not _has_unread(peer.socket):
                        raise self._lost(rank)
                    waiting.discard(rank)
            if has_met or (source is not None and source.socket.fileno() in events):
                return
            if any(events.get(peer.socket.fileno(), 0) & (_OUT | _GONE) for peer in self._sending):
                return
            if end_s is not None and time.monotonic() >= end_s:
                who = f"rank {source.rank}" if source is not None else "other ranks"
                # "Collective operation timeout" is what the agent knows.
                raise PeerLost(
                    f"collective operation timeout: waited {self._timeout_s:g} s for {who}, channel {self._channel}"
                )

    def _poll(self, source: _Connection | None, waiting: Collection[int], end_s: float | None) -> dict[int, int]:
        """What has happened, by file descriptor. Returns empty when it is time to look at the clock."""
        wanted: dict[int, int] = {}
        if self._listener is not None:
            wanted[self._listener.fileno()] = _IN
        for unknown in self._unknown:
            wanted[unknown.socket.fileno()] = _IN
        for rank in waiting:
            if rank in self._connected:
                wanted[self._connected[rank].socket.fileno()] = _LEFT
        if source is not None:
            wanted[source.socket.fileno()] = _IN
        for peer in self._sending:
            wanted[peer.socket.fileno()] = wanted.get(peer.socket.fileno(), 0) | _OUT
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        ends_s = [unknown.until_s for unknown in self._unknown] + ([] if end_s is None else [end_s])
        left_s = min(ends_s, default=math.inf) - time.monotonic()
        return dict(poller.poll(1000 * min(max(0.0, left_s), _POLL_S_MAX)))

    def _queue(self, target: _Connection, parts: Iterable[Bytes]) -> None:
        target.outgoing += [memoryview(part).cast("B") for part in parts if len(part)]
        if target.outgoing:
            self._sending.add(target)
            self._write(target)

    def _write_all(self) -> None:
        for target in list(self._sending):
            self._write(target)

    def _write(self, target: _Connection) -> None:
        """Send what the kernel takes now."""
        try:
            while target.outgoing:
                first = target.outgoing[0]
                sent = target.socket.send(first)
                if sent < len(first):
                    target.outgoing[0] = first[sent:]
                else:
                    target.outgoing.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(target.rank, error) from error
        self._sending.discard(target)

    # Closing

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        for unknown in self._unknown:
            unknown.socket.close()
        self._unknown = []

    def _close_sockets(self) -> None:
        self._close_listener()
        for peer in self._connected.values():
            peer.socket.close()
        self._sending.clear()


def _has_unread(peer: socket.socket) -> bool:
    try:
        return bool(peer.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _tune(made: socket.socket) -> None:
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # No TCP_USER_TIMEOUT: the kernel would also count the time in which a living rank is too busy to read.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _abandon() -> None:
    """In a forked child: a connection lives until all its copies are closed, and its peers must see this rank's end."""
    for each in list(_all):
        each.close("it belongs to the process that was forked")


os.register_at_fork(after_in_child=_abandon)
