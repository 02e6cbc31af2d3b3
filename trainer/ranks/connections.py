"""TCP connections from this rank to others of its channel, each made when it is first needed.

Of two ranks the higher one connects, and the lower one listens. One thread uses them, and they start none. Every wait
also admits ranks that connect, and sends queued data: ranks that send to each other, or in a ring, do not deadlock.

After an error all connections are closed, so that it propagates to the neighbours, and eventually to all ranks.
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
from elaunch.trainer.ranks.handshake import PENDING_MAX, SECRET_BYTES, Contact, PendingPeer, StoreContacts, dial, listen

Bytes: TypeAlias = "bytes | bytearray | memoryview"
# A read takes at most this much, so that relayed data is sent while more arrives.
_READ_BYTES = 1 << 20
# A rejected rank retries, with pauses between: a flood of connections may be over by then, or the address was that of a
# process before a restart. Without a route it gives up after two minutes.
_PAUSE_S, _NO_ROUTE_S = 0.2, 120.0
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_ROUTE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
# How often the store is polled for a missing rank: after an eighth of the time waited so far.
_READ_SHARE, _READ_S, _READ_S_MAX = 8, 0.001, 1.0
_IN, _OUT, _LEFT = select.POLLIN, select.POLLOUT, select.POLLRDHUP
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerLost(RuntimeError):
    """A rank has closed its connection, or does not respond. The connections cannot be used any more.

    The message has the text by which the agent recognises that another rank has failed first.
    """


class Connections:
    """The connections of `rank` in `channel`, whose name is the same on all ranks.

    `timeout_s` is how long it waits for an idle rank; None waits as long as the rank lives. All methods raise PeerLost.
    Use them from one thread at a time. The ranks in an argument `waiting` are blocked until this rank is done with the
    call: one that closes its connection is lost.
    """

    def __init__(
        self, channel: str, rank: int, world_size: int, contacts: StoreContacts, *, timeout_s: float | None = None
    ) -> None:
        self._channel, self._rank = channel, rank
        self._contacts, self._timeout_s = contacts, timeout_s
        # The higher ranks that have not connected yet, and where this one listens for them. The oldest peer is first.
        self._missing = set(range(rank + 1, world_size))
        self._listening: tuple[socket.socket, Contact] | None = None
        self._pending: list[PendingPeer] = []
        self._is_open = False
        self._connected: dict[int, socket.socket] = {}
        # Queued data, by rank.
        self._outgoing: dict[int, deque[memoryview]] = {}
        # The ranks in `waiting` of the present call.
        self._waiting: set[int] = set()
        self._why_closed = ""
        _all.add(self)

    def __del__(self) -> None:
        self._close_sockets()

    def close(self, why: str = "this rank has closed it") -> None:
        """Close all connections: no rank can use this channel any more."""
        self._why_closed = self._why_closed or why
        self._close_sockets()

    def meet(self, ranks: Collection[int], *, waiting: Collection[int] = (), patient: bool = False) -> None:
        """Connect to all of these ranks, which do the same. Later calls do not read the store for them.

        With `patient` later waits have no timeout: they last while the rank lives.
        """
        with self._or_close(waiting):
            # Lower ranks first: they wait for this one to connect.
            for rank in sorted(ranks):
                self._meet(rank)
        if patient:
            self._timeout_s = None

    def send(self, rank: int, *parts: Bytes) -> None:
        """Begin to send. The parts must not change until `flush` returns, or a later part is sent."""
        with self._or_close():
            self._meet(rank)
            self._queue(rank, parts)

    def flush(self) -> None:
        """Wait until everything is sent, that is, given to the kernel."""
        with self._or_close():
            while self._outgoing:
                self._wait()

    def receive(
        self, rank: int, into: memoryview, *, waiting: Collection[int] = (), pass_on: int | None = None
    ) -> None:
        """Fill `into` from that rank, and relay it to `pass_on` while it arrives."""
        with self._or_close(waiting):
            for each in (rank, *(() if pass_on is None else (pass_on,))):
                self._meet(each)
            for part in self._arriving(rank, into):
                if pass_on is not None:
                    self._queue(pass_on, [part])

    @contextlib.contextmanager
    def _or_close(self, waiting: Collection[int] = ()) -> Iterator[None]:
        if self._why_closed:
            raise PeerLost(f"the ranks' channel {self._channel} is closed: {self._why_closed}")
        self._waiting = set(waiting)
        try:
            yield
        except BaseException as error:
            # Even after an interrupt: a partly sent message cannot be taken back.
            self.close(str(error) or type(error).__name__)
            raise

    def _lost(self, rank: int, why: str = "") -> PeerLost:
        why = f" ({why})" if why else ""
        return PeerLost(f"rank {rank} is gone or has failed: connection closed by peer{why}, channel {self._channel}")

    def _timed_out(self, who: str) -> PeerLost:
        # The agent's PEER_LOST matches "collective operation timeout".
        return PeerLost(
            f"collective operation timeout: waited {self._timeout_s:g} s for {who}, channel {self._channel}"
        )

    # Connecting

    def _meet(self, rank: int) -> None:
        """Connect to that rank, unless it is connected."""
        if rank not in self._connected:
            self._listen()
            if rank < self._rank:
                self._connected[rank] = self._connect(rank)
        while rank not in self._connected:
            self._wait()

    def _listen(self) -> None:
        """Listen for higher ranks, and publish the address."""
        if not self._is_open and self._missing:
            address = self._contacts.own_address()
            made = listen(address, len(self._missing))
            port, secret = made.getsockname()[1], secrets.token_bytes(SECRET_BYTES)
            self._listening = made, Contact(self._channel, self._rank, address, port, secret)
            self._contacts.publish(self._rank, self._listening[1].to_bytes())
        self._is_open = True

    def _connect(self, rank: int) -> socket.socket:
        """Connect to a lower rank; retry after a rejection, or without a response."""
        begun_s, end_s = time.monotonic(), self._end_s()
        while True:
            contact = self._contact_of(rank, end_s)
            try:
                return dial(contact, self._rank)
            except OSError as error:
                waited_s, has_no_route = time.monotonic() - begun_s, error.errno in _NO_ROUTE
                if waited_s >= _NO_ROUTE_S if has_no_route else begun_s + waited_s >= end_s:
                    why = f"{reason(error)}, at {contact.address} port {contact.port}"
                    if has_no_route:
                        why += "; open that port to the other nodes, or name another interface of that node in "
                        why += "GLOO_SOCKET_IFNAME"
                    raise self._lost(rank, why) from None
            # Jitter by rank: the other rank may admit this one only while it pauses itself.
            self._pause(_PAUSE_S * (1 + self._rank % 7 / 7))

    def _contact_of(self, rank: int, end_s: float) -> Contact:
        """Wait until that rank has published its address."""
        begun_s = time.monotonic()
        while (content := self._contacts.find(rank)) is None:
            now_s = time.monotonic()
            if now_s >= end_s:
                raise self._timed_out(f"rank {rank}")
            self._pause(min(max(_READ_S, (now_s - begun_s) / _READ_SHARE), _READ_S_MAX, end_s - now_s))
        return Contact.from_bytes(self._channel, rank, content)

    def _admit(self, events: Collection[int]) -> bool:
        """Accept connections of higher ranks, and close unauthenticated ones. Returns whether a rank has connected."""
        if self._listening is None:
            return False
        made, contact = self._listening
        if made.fileno() in events:
            self._accept(made)
        now_s, there = time.monotonic(), len(self._missing)
        for peer in [*self._pending]:
            try:
                rank = peer.admitted(contact, self._missing)
            except BlockingIOError:
                if now_s >= peer.until_s:
                    self._reject(peer)
            except OSError:
                self._reject(peer)
            else:
                self._missing.discard(rank)
                self._pending.remove(peer)
                self._connected[rank] = peer.socket
        if not self._missing:
            self._close_listening()
        return len(self._missing) < there

    def _accept(self, made: socket.socket) -> None:
        """Accept some connections. At capacity, the oldest that has not responded is closed."""
        for _ in range(PENDING_MAX // 4):
            try:
                taken, _ = made.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    if not self._pending:
                        # The other rank would wait for its response, and this one would busy-wait.
                        raise PeerLost(f"no other rank can connect to this one: {error.strerror}") from error
                    self._reject(self._pending[0])
                # Otherwise none is left, or the peer has aborted this one.
                return
            self._pending.append(PendingPeer(taken))
            if len(self._pending) > PENDING_MAX:
                self._reject(self._pending[0])

    def _reject(self, peer: PendingPeer) -> None:
        peer.socket.close()
        self._pending.remove(peer)

    # Waiting

    def _arriving(self, source: int, into: memoryview) -> Iterator[memoryview]:
        """Fill `into` with what that rank sends. Yields each part when it has arrived."""
        filled = 0
        while filled < len(into):
            for target in [*self._outgoing]:
                self._write(target)
            count = None
            with self._errors(source):
                count = self._connected[source].recv_into(into[filled : filled + _READ_BYTES])
            if count == 0:
                raise self._lost(source)
            if count:
                yield into[filled : filled + count]
                filled += count
            else:
                self._wait(source)

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._wait(until_s=until_s)

    def _end_s(self) -> float:
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _wait(self, source: int | None = None, until_s: float = math.inf) -> None:
        """Wait until `source` has sent something, something was sent, a rank has connected, or it is `until_s`."""
        end_s = self._end_s() if until_s == math.inf else until_s
        while True:
            events = self._poll(source, end_s)
            has_met = self._admit(events)
            for rank in self._waiting & self._connected.keys():
                if self._event(events, rank) & (_LEFT | _GONE):
                    raise self._lost(rank)
            ready = [rank for rank in self._outgoing if self._event(events, rank) & (_OUT | _GONE)]
            for rank in ready:
                self._write(rank)
            has_sent, now_s = source is not None and self._event(events, source), time.monotonic()
            if has_sent or has_met or ready or now_s >= until_s:
                return
            if now_s >= end_s:
                raise self._timed_out("other ranks" if source is None else f"rank {source}")

    def _event(self, events: dict[int, int], rank: int) -> int:
        return events.get(self._connected[rank].fileno(), 0)

    def _poll(self, source: int | None, until_s: float) -> dict[int, int]:
        """The sockets' events by file descriptor, as soon as there is one; empty at `until_s`."""
        wanted: dict[int, int] = {}
        if self._listening is not None:
            wanted[self._listening[0].fileno()] = _IN
            wanted.update((peer.socket.fileno(), _IN) for peer in self._pending)
            until_s = min([until_s, *(peer.until_s for peer in self._pending)])
        wanted.update((self._connected[rank].fileno(), _LEFT) for rank in self._waiting & self._connected.keys())
        if source is not None:
            wanted[self._connected[source].fileno()] = _IN
        for rank in self._outgoing:
            fd = self._connected[rank].fileno()
            wanted[fd] = wanted.get(fd, 0) | _OUT
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        left_s = max(0.0, until_s - time.monotonic())
        return dict(poller.poll(None if left_s == math.inf else math.ceil(1000 * left_s)))

    # Sending and closing

    def _queue(self, rank: int, parts: Iterable[Bytes]) -> None:
        self._outgoing.setdefault(rank, deque()).extend(memoryview(part).cast("B") for part in parts if len(part))
        self._write(rank)

    def _write(self, rank: int) -> None:
        """Send what the socket's buffer takes."""
        parts = self._outgoing[rank]
        with self._errors(rank):
            while parts:
                if (sent := self._connected[rank].send(parts[0])) < len(parts[0]):
                    parts[0] = parts[0][sent:]
                else:
                    parts.popleft()
        if not parts:
            del self._outgoing[rank]

    @contextlib.contextmanager
    def _errors(self, rank: int) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            pass
        except OSError as error:
            # Its text is in the message. The agent would take a chained exception for the program's own error.
            raise self._lost(rank, reason(error)) from None

    def _close_listening(self) -> None:
        if self._listening is not None:
            self._listening[0].close()
        self._listening = None
        for peer in [*self._pending]:
            self._reject(peer)

    def _close_sockets(self) -> None:
        self._close_listening()
        for each in self._connected.values():
            each.close()
        self._outgoing.clear()


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _abandon() -> None:
    """In a forked child: a connection lives until all its copies are closed, and its peers must see this rank exit."""
    for each in list(_all):
        each.close("it belongs to the parent process")


os.register_at_fork(after_in_child=_abandon)
