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
from typing import TypeAlias

from elaunch.trainer.files import reason
from elaunch.trainer.ranks.handshake import NONCE_BYTES, REPLY_BYTES, Contact, Contacts, RankListener, tuned

Bytes: TypeAlias = "bytes | bytearray | memoryview"
# A read takes at most this much, so that what is passed on goes out while more comes in.
_READ_BYTES = 1 << 20
# A rank that is turned away tries again for so long, with pauses that grow: a flood of strangers may be over by then,
# or the address was that of a process before a restart. Where there is no route, it gives up earlier.
_TRIES_S, _NO_ROUTE_S, _PAUSE_S, _PAUSE_S_MAX = 600.0, 60.0, 0.05, 1.0
# How often the store is read for a rank that has not come (after an eighth of the time that it was waited for), and
# for another address of one that does not answer.
_READ_SHARE, _READ_S, _READ_S_MAX, _REREAD_S = 8, 0.001, 1.0, 5.0
_NO_ROUTE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
_IN, _OUT, _LEFT = select.POLLIN, select.POLLOUT, select.POLLRDHUP
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerLost(RuntimeError):
    """A rank that is waited for has closed its connection, or does not answer. The connections are of no use any more.

    The message has the words by which the agent knows that another rank has failed first.
    """


class BrokenConnection(Exception):
    """The connection to `peer` has failed, or the other end has closed it. `why` is the error's text, or empty."""

    def __init__(self, peer: RankConnection, why: str = "", number: int | None = None) -> None:
        super().__init__(f"the connection to rank {peer.rank} is closed")
        self.peer, self.why, self.number = peer, why, number


class RankConnection:
    """The connection to `rank`. Nothing here waits; `read` and `write` raise BrokenConnection."""

    def __init__(self, rank: int, made: socket.socket) -> None:
        self.rank, self.socket = rank, made
        self._outgoing: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    def queue(self, parts: Iterable[Bytes]) -> None:
        """Send these after what is waiting already. They must not change until `write` has returned True."""
        self._outgoing += [memoryview(part).cast("B") for part in parts if len(part)]

    def write(self) -> bool:
        """Send what the kernel takes now. Returns whether that is all."""
        with self._errors():
            while self._outgoing:
                first = self._outgoing[0]
                if (sent := self.socket.send(first)) < len(first):
                    self._outgoing[0] = first[sent:]
                else:
                    self._outgoing.popleft()
        return not self._outgoing

    def read(self, into: memoryview) -> int:
        """Read what has arrived, as far as it fits. Returns the number of bytes, 0 if there are none."""
        count = -1
        with self._errors():
            count = self.socket.recv_into(into[:_READ_BYTES])
        if not count:
            raise BrokenConnection(self)
        return max(0, count)

    def has_unread(self) -> bool:
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            pass
        except OSError as error:
            raise BrokenConnection(self, reason(error), error.errno) from error


class Connections:
    """Those of rank `rank` in `channel`, whose name is the same on all ranks.

    `timeout_s` is how long it waits for a rank that does nothing; None waits as long as the rank lives. All methods
    raise PeerLost. Use them from one thread at a time. The ranks in an argument `waiting` can do nothing before this
    rank is done with the call: if one of them closes its connection, and all that it has sent is read, it is lost.
    """

    def __init__(
        self, channel: str, rank: int, world_size: int, contacts: Contacts, *, timeout_s: float | None = None
    ) -> None:
        self._channel, self._rank, self._world_size = channel, rank, world_size
        self._contacts, self._timeout_s = contacts, timeout_s
        self._listener: RankListener | None = None
        self._is_open = False
        self._connected: dict[int, RankConnection] = {}
        self._sending: set[RankConnection] = set()
        self._why_closed = ""
        _all.add(self)

    def __del__(self) -> None:
        self._close_sockets()

    def close(self, why: str = "this rank has closed it") -> None:
        """Close all connections: no rank can use this channel any more."""
        self._why_closed = self._why_closed or why
        self._close_sockets()

    def meet(self, ranks: Collection[int], *, patient: bool = False) -> None:
        """Connect to all of these ranks, which do the same. Later nothing reads the store for them.

        With `patient` a rank is waited for as long as it lives from then on.
        """
        with self._or_close():
            # Downwards first: the lower rank waits for the higher one, so somebody has to begin.
            for rank in sorted(ranks):
                self._to(rank, ranks)
        if patient:
            self._timeout_s = None

    def send(self, rank: int, *parts: Bytes, waiting: Collection[int] = ()) -> None:
        """Begin to send. The parts must not change until `flush` returns, or anything that was sent after them has."""
        with self._or_close():
            self._queue(self._to(rank, waiting), parts)

    def flush(self) -> None:
        """Wait until everything is sent, that is, given to the kernel."""
        with self._or_close():
            while self._sending:
                self._wait()

    def receive(
        self, rank: int, into: memoryview, *, waiting: Collection[int] = (), pass_on: int | None = None
    ) -> None:
        """Fill `into` with what that rank sends, and begin to send it to `pass_on` while it arrives."""
        with self._or_close():
            # Also those that have not connected yet: they do so meanwhile.
            source = self._to(rank, waiting)
            target = None if pass_on is None else self._to(pass_on, waiting)
            for part in self._arriving(source, into, waiting):
                if target is not None:
                    self._queue(target, [part])

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        if self._why_closed:
            raise PeerLost(f"the ranks' channel {self._channel} is over: {self._why_closed}")
        try:
            yield
        except BrokenConnection as error:
            why = f" ({error.why})" if error.why else ""
            lost = f"rank {error.peer.rank} is gone or has failed: connection closed by peer{why}"
            lost += f", channel {self._channel}"
            self.close(lost)
            # Its words are in the message. By a chain of two the agent would take it for the program's own error.
            raise PeerLost(lost) from None
        except BaseException as error:
            # Also after an interrupt: a message that was sent in part cannot be taken back.
            self.close(str(error) or type(error).__name__)
            raise

    # Connecting

    def _to(self, rank: int, waiting: Collection[int]) -> RankConnection:
        """The connection to that rank, which is made now if there is none."""
        if rank not in self._connected:
            self._listen()
            if rank < self._rank:
                self._connected[rank] = self._connect(rank, waiting)
        while rank not in self._connected:
            self._wait(None, waiting)
        return self._connected[rank]

    def _listen(self) -> None:
        """Listen for higher ranks, and publish where."""
        if not self._is_open and self._rank + 1 < self._world_size:
            self._listener = RankListener(self._channel, self._rank, self._world_size, self._contacts.own_address())
            self._contacts.publish(self._rank, self._listener.contact.to_bytes())
        self._is_open = True

    def _connect(self, rank: int, waiting: Collection[int]) -> RankConnection:
        """Connect to a lower rank, again if this rank is turned away."""
        pause_s, begun_s = _PAUSE_S, time.monotonic()
        while True:
            contact = self._contact_of(rank, waiting)
            made = RankConnection(rank, tuned(socket.socket(contact.family)))
            try:
                self._greet(made, contact, waiting)
                return made
            except BaseException as error:
                self._sending.discard(made)
                made.socket.close()
                if not isinstance(error, BrokenConnection) or error.peer is not made:
                    raise
                has_no_route = error.number in _NO_ROUTE
                tries_s = min(_NO_ROUTE_S if has_no_route else _TRIES_S, self._timeout_s or math.inf)
                if time.monotonic() + pause_s >= begun_s + tries_s:
                    way_out = "; open that port to the other nodes, or name another interface of that node in "
                    why = f"{error.why or 'the connection was closed before its reply'}, at {contact.address} port "
                    why += f"{contact.port}{f'{way_out}GLOO_SOCKET_IFNAME' if has_no_route else ''}"
                    raise BrokenConnection(made, why) from error
            self._pause(pause_s, waiting)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _contact_of(self, rank: int, waiting: Collection[int]) -> Contact:
        """Wait until that rank has published where it listens. No `waiting` rank must die unnoticed meanwhile."""
        begun_s, end_s = time.monotonic(), self._end_s()
        while (content := self._contacts.find(rank)) is None:
            now_s = time.monotonic()
            if now_s >= end_s:
                raise self._timed_out(rank)
            pause_s = min(max(_READ_S, (now_s - begun_s) / _READ_SHARE), _READ_S_MAX, end_s - now_s)
            self._pause(pause_s, waiting)
        return Contact.from_bytes(self._channel, rank, content)

    def _greet(self, made: RankConnection, contact: Contact, waiting: Collection[int]) -> None:
        """Connect, and prove to each other that both are of this channel."""
        asked, reply = secrets.token_bytes(NONCE_BYTES), bytearray(REPLY_BYTES)
        try:
            with contextlib.suppress(BlockingIOError):
                made.socket.connect((contact.address, contact.port))
        except OSError as error:
            raise BrokenConnection(made, reason(error), error.errno) from error
        self._queue(made, [contact.hello(self._rank, asked)])
        end_s = self._end_s()
        # It may be another process's address by now, which never answers.
        while not self._poll(made, (), 0).get(made.fileno(), 0) & (_IN | _GONE):
            if time.monotonic() >= end_s:
                raise self._timed_out(contact.rank)
            self._wait(made, waiting, min(end_s, time.monotonic() + _REREAD_S))
            if self._contact_of(contact.rank, waiting) != contact:
                raise BrokenConnection(made, f"rank {contact.rank} listens elsewhere by now")
        for _ in self._arriving(made, memoryview(reply), waiting):
            pass
        confirmation = contact.confirmation(self._rank, asked, bytes(reply))
        if confirmation is None:
            raise BrokenConnection(made, f"the process there is not rank {contact.rank} any more")
        self._queue(made, [confirmation])

    def _let_in(self, events: Collection[int]) -> bool:
        """Take the connections of higher ranks. Returns whether a rank has connected."""
        if self._listener is None:
            return False
        try:
            admitted = self._listener.admit(events)
        except OSError as error:
            raise PeerLost(f"no other rank can connect to this one: {error.strerror}") from error
        for rank, made in admitted:
            self._connected[rank] = RankConnection(rank, made)
        if self._listener.is_complete:
            self._close_listener()
        return bool(admitted)

    # Waiting

    def _arriving(self, source: RankConnection, into: memoryview, waiting: Collection[int]) -> Iterator[memoryview]:
        """Fill `into` with what `source` sends. Yields each part when it has arrived."""
        filled = 0
        while filled < len(into):
            for target in list(self._sending):
                self._write(target)
            if count := source.read(into[filled:]):
                yield into[filled : filled + count]
                filled += count
            else:
                self._wait(source, waiting)

    def _pause(self, seconds: float, waiting: Collection[int]) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._wait(None, waiting, until_s)

    def _end_s(self) -> float:
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _wait(
        self, source: RankConnection | None = None, waiting: Collection[int] = (), until_s: float = math.inf
    ) -> None:
        """Wait until `source` has sent something, something was sent, a rank has connected, or it is `until_s`."""
        end_s, alive = self._end_s(), set(waiting)
        while True:
            events = self._poll(source, alive, min(end_s, until_s))
            has_met = self._let_in(events)
            for peer in [self._connected[rank] for rank in alive & self._connected.keys()]:
                if peer is not source and events.get(peer.fileno(), 0) & (_LEFT | _GONE):
                    if not peer.has_unread():
                        raise BrokenConnection(peer)
                    alive.discard(peer.rank)
            ready = [peer for peer in self._sending if events.get(peer.fileno(), 0) & (_OUT | _GONE)]
            for peer in ready:
                self._write(peer)
            now_s = time.monotonic()
            if has_met or ready or (source is not None and source.fileno() in events) or now_s >= until_s:
                return
            if now_s >= end_s:
                raise self._timed_out(None if source is None else source.rank)

    def _timed_out(self, rank: int | None) -> PeerLost:
        who = "other ranks" if rank is None else f"rank {rank}"
        # "Collective operation timeout" is what the agent knows.
        return PeerLost(
            f"collective operation timeout: waited {self._timeout_s:g} s for {who}, channel {self._channel}"
        )

    def _poll(self, source: RankConnection | None, waiting: Collection[int], until_s: float) -> dict[int, int]:
        """The events of each socket by file descriptor, as soon as there is one; empty when the time is over."""
        wanted: dict[int, int] = {}
        if self._listener is not None:
            wanted.update((descriptor, _IN) for descriptor in self._listener.descriptors)
            until_s = min(until_s, self._listener.until_s)
        wanted.update((self._connected[rank].fileno(), _LEFT) for rank in waiting if rank in self._connected)
        if source is not None:
            wanted[source.fileno()] = _IN
        for peer in self._sending:
            wanted[peer.fileno()] = wanted.get(peer.fileno(), 0) | _OUT
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        left_s = max(0.0, until_s - time.monotonic())
        return dict(poller.poll(None if left_s == math.inf else math.ceil(1000 * left_s)))

    # Sending and closing

    def _queue(self, target: RankConnection, parts: Iterable[Bytes]) -> None:
        target.queue(parts)
        self._write(target)

    def _write(self, target: RankConnection) -> None:
        if target.write():
            self._sending.discard(target)
        else:
            self._sending.add(target)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def _close_sockets(self) -> None:
        self._close_listener()
        for peer in self._connected.values():
            peer.socket.close()
        self._sending.clear()


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _abandon() -> None:
    """In a forked child: a connection lives until all its copies are closed, and its peers must see this rank's end."""
    for each in list(_all):
        each.close("it belongs to the process that was forked")


os.register_at_fork(after_in_child=_abandon)
