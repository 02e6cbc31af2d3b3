"""TCP connections from this rank to others of its channel, each made when it is first needed.

Of two ranks the higher one connects, and the lower one listens. One thread uses them: no thread runs behind its back.
Whatever it waits for, it meanwhile lets ranks in that connect, and sends what is waiting to be sent. So two ranks that
send to each other do not wait for each other, and neither does a ring of them.

After an error all connections are closed. So the neighbours get an error too, then theirs, and at last all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import secrets
import select
import time
import weakref
from collections.abc import Collection, Iterable, Iterator

from elaunch.trainer.files import reason
from elaunch.trainer.ranks.connection import BrokenConnection, Bytes, RankConnection
from elaunch.trainer.ranks.greeting import NONCE_BYTES, REPLY_BYTES, Contact, Contacts
from elaunch.trainer.ranks.listener import RankListener
from elaunch.trainer.ranks.own_address import own_address
from elaunch.trainer.ranks.tcp import SILENT_S, has_unread, is_silent, unconnected

# A rank that is turned away tries again for so long, with pauses that grow: a flood of strangers may be over by then.
_TRIES_S, _PAUSE_S, _PAUSE_S_MAX = 60.0, 0.05, 1.0
# How often the store is asked for a rank that has not come: after an eighth of the time that it was waited for.
_ASK_SHARE, _ASK_S, _ASK_S_MAX = 8, 0.001, 1.0
# At most so long passes before a wait looks at the clock, at silent hosts, and at ranks that have died meanwhile.
_LOOK_S = 5.0
_IN, _OUT, _LEFT = select.POLLIN, select.POLLOUT, select.POLLRDHUP
_NO_WAY = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerLost(RuntimeError):
    """A rank that is waited for has closed its connection, or does not answer. The connections are of no use any more.

    The message has the words by which the agent knows that another rank has failed first.
    """


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
        self._looked_s = -math.inf
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
            lost = f"rank {error.peer.rank} is gone or has failed: connection closed by peer{error.why}"
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
        found = self._connected.get(rank)
        if found is not None:
            return found
        if not self._is_open:
            self._open()
        if rank < self._rank:
            self._connected[rank] = self._connect(rank, waiting)
        while rank not in self._connected:
            self._wait(None, waiting)
        return self._connected[rank]

    def _open(self) -> None:
        """Listen for higher ranks, and tell them where."""
        if self._rank + 1 < self._world_size:
            self._listener = RankListener(self._channel, self._rank, self._world_size, own_address(os.environ))
            self._contacts.publish(self._rank, self._listener.contact.to_bytes())
        self._is_open = True

    def _connect(self, rank: int, waiting: Collection[int]) -> RankConnection:
        """Connect to a lower rank, again if this rank is turned away: by a full backlog or a flood of strangers."""
        pause_s, until_s = _PAUSE_S, math.inf
        # After a restart the new process may take long to come. Until then this may be the contact of the old one.
        tries_s = math.inf if self._contacts.may_be_old else _TRIES_S
        for tries in itertools.count(1):
            contact = self._contact_of(rank, waiting)
            made = RankConnection(rank, unconnected(contact.address))
            try:
                self._greet(made, contact, waiting)
                return made
            except BaseException as error:
                self._sending.discard(made)
                made.close()
                if not isinstance(error, BrokenConnection) or error.peer is not made:
                    raise
                until_s = min(until_s, time.monotonic() + min(tries_s, self._timeout_s or math.inf))
                # Nobody listens there any more, unless this contact is from before a restart.
                is_over = isinstance(error.error, ConnectionRefusedError) and not self._contacts.may_be_old
                if is_over or time.monotonic() >= until_s:
                    raise BrokenConnection(made, _told(error.error, contact, tries)) from error
            self._pause(min(pause_s, until_s - time.monotonic()), waiting)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        raise AssertionError("a count has no end")

    def _contact_of(self, rank: int, waiting: Collection[int]) -> Contact:
        """Wait until that rank has said where it listens. No `waiting` rank must die unnoticed meanwhile."""
        begun_s, end_s = time.monotonic(), self._end_s()
        while (content := self._contacts.find(rank)) is None:
            now_s = time.monotonic()
            if now_s >= end_s:
                raise self._timed_out(rank)
            pause_s = min(max(_ASK_S, (now_s - begun_s) / _ASK_SHARE), _ASK_S_MAX, end_s - now_s)
            self._pause(pause_s, waiting)
        return Contact.from_bytes(self._channel, rank, content)

    def _greet(self, made: RankConnection, contact: Contact, waiting: Collection[int]) -> None:
        """Connect, and prove to each other that both are of this channel."""
        asked, reply = secrets.token_bytes(NONCE_BYTES), bytearray(REPLY_BYTES)
        try:
            with contextlib.suppress(BlockingIOError):
                made.socket.connect((contact.address, contact.port))
        except OSError as error:
            raise BrokenConnection(made, error) from error
        self._queue(made, [contact.hello(self._rank, asked)])
        if self._contacts.may_be_old:
            self._await_newest(made, contact, waiting)
        for _ in self._arriving(made, memoryview(reply), waiting):
            pass
        confirmation = contact.confirmation(self._rank, asked, bytes(reply))
        if confirmation is None:
            raise BrokenConnection(
                made, ConnectionRefusedError(f"the process there is not rank {contact.rank} any more")
            )
        self._queue(made, [confirmation])

    def _await_newest(self, made: RankConnection, contact: Contact, waiting: Collection[int]) -> None:
        """Wait for the reply. Another process may have the address of an old `contact` by now, and never give one."""
        end_s = self._end_s()
        while not self._poll(made, (), 0).get(made.fileno(), 0) & (_IN | _GONE):
            if time.monotonic() >= end_s:
                raise self._timed_out(contact.rank)
            self._wait(made, waiting, min(end_s, time.monotonic() + _LOOK_S))
            if self._contact_of(contact.rank, waiting) != contact:
                raise BrokenConnection(made, ConnectionRefusedError(f"rank {contact.rank} listens elsewhere by now"))

    def _let_in(self, events: Collection[int]) -> bool:
        """Take the connections of higher ranks. Returns whether a rank has connected."""
        if self._listener is None:
            return False
        try:
            admitted = self._listener.admit(events)
        except OSError as error:
            raise PeerLost(f"no other rank can connect to this one: {error.strerror}") from error
        # A rank whose connection has failed would have tried again by now, and its last try may take long.
        for rank in self._listener.left_before(time.monotonic() - 2 * _TRIES_S):
            raise PeerLost(f"rank {rank} is gone or has failed: it left while it connected, channel {self._channel}")
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
            if self._sending:
                self._write_all()
            if count := source.read(into[filled:]):
                yield into[filled : filled + count]
                filled += count
            else:
                self._wait(source, waiting)

    def _pause(self, seconds: float, waiting: Collection[int]) -> None:
        until_s = time.monotonic() + seconds
        self._wait(None, waiting, until_s)
        while time.monotonic() < until_s:
            self._wait(None, waiting, until_s)

    def _end_s(self) -> float:
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _wait(
        self, source: RankConnection | None = None, waiting: Collection[int] = (), until_s: float = math.inf
    ) -> None:
        """Wait until `source` has sent something, something was sent, a rank has connected, or it is `until_s`."""
        end_s, waiting = self._end_s(), set(waiting)
        while True:
            events = self._poll(source, waiting, min(end_s, until_s))
            has_met = self._let_in(events)
            self._require_alive(source, waiting, events)
            ready = [peer for peer in self._sending if events.get(peer.fileno(), 0) & (_OUT | _GONE)]
            for peer in ready:
                self._write(peer)
            if has_met or ready or (source is not None and source.fileno() in events):
                return
            now_s = time.monotonic()
            if now_s >= until_s:
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
        """The events of each socket by file descriptor, as soon as there is one; empty when it is time to look."""
        wanted: dict[int, int] = {}
        if self._listener is not None:
            wanted.update((descriptor, _IN) for descriptor in self._listener.descriptors)
            until_s = min(until_s, self._listener.until_s)
        for rank in waiting:
            if rank in self._connected:
                wanted[self._connected[rank].fileno()] = _LEFT
        if source is not None:
            wanted[source.fileno()] = _IN
        for peer in self._sending:
            wanted[peer.fileno()] = wanted.get(peer.fileno(), 0) | _OUT
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        return dict(poller.poll(1000 * min(max(0.0, until_s - time.monotonic()), _LOOK_S)))

    def _require_alive(self, source: RankConnection | None, waiting: set[int], events: dict[int, int]) -> None:
        """Raise PeerLost if a rank that matters now has closed its connection, or its host does not answer."""
        for rank in [*waiting]:
            peer = self._connected.get(rank)
            if peer is not None and peer is not source and events.get(peer.fileno(), 0) & (_LEFT | _GONE):
                if not has_unread(peer.socket):
                    raise BrokenConnection(peer)
                waiting.discard(rank)
        if time.monotonic() < self._looked_s + _LOOK_S:
            return
        self._looked_s = time.monotonic()
        matter = {*self._sending, *(self._connected[rank] for rank in waiting if rank in self._connected)}
        for peer in matter if source is None else {source, *matter}:
            if is_silent(peer.socket):
                raise BrokenConnection(peer, OSError(f"its host has not answered for {SILENT_S} s"))

    # Sending

    def _queue(self, target: RankConnection, parts: Iterable[Bytes]) -> None:
        target.queue(parts)
        self._write(target)

    def _write_all(self) -> None:
        for target in list(self._sending):
            self._write(target)

    def _write(self, target: RankConnection) -> None:
        if target.write():
            self._sending.discard(target)
        else:
            self._sending.add(target)

    # Closing

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def _close_sockets(self) -> None:
        self._close_listener()
        for peer in self._connected.values():
            peer.close()
        self._sending.clear()


def _told(error: OSError | None, contact: Contact, tries: int) -> OSError:
    """The last reason why this rank was not let in, with the place and the number of tries."""
    why = "the connection was closed before its reply" if error is None else reason(error)
    often = "" if tries == 1 else f", {tries} times"
    way_out = "; open that port to the other nodes, or name another interface of that node in GLOO_SOCKET_IFNAME"
    is_barred = error is not None and error.errno in _NO_WAY
    return OSError(f"{why}, at {contact.address} port {contact.port}{often}{way_out if is_barred else ''}")


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _abandon() -> None:
    """In a forked child: a connection lives until all its copies are closed, and its peers must see this rank's end."""
    for each in list(_all):
        each.close("it belongs to the process that was forked")


os.register_at_fork(after_in_child=_abandon)
