"""One client of a served store: what it asks and what waits to be sent to it, on one connection."""

from __future__ import annotations

import math
import selectors

from elaunch.rendezvous.connection import READ_BYTES_MAX, STRANGERS_READ_BYTES_MAX, Connection
from elaunch.rendezvous.httpserver import RequestReader, chunk
from elaunch.rendezvous.watchers import Watcher

# What waits to be sent on one connection; a watch that has as much waiting is told no more until some of it went.
OUTGOING_BYTES_MAX = 1 << 20


class Client:
    """Its requests are answered in order, until one of them is a watch.

    `dirty` are the server's clients that have something to be sent, this one among them whenever it has.
    """

    def __init__(self, connection: Connection, address: str, reader: RequestReader, dirty: dict[Client, None]) -> None:
        self.connection = connection
        self.address = address
        self.reader = reader
        # It has shown the secret, in a request that was complete.
        self.is_known = False
        # When it is closed, unless another request is complete before; of a stranger the server decides.
        self.deadline_s = math.inf
        # When something of what waits for it went, or began to wait.
        self.moved_s = math.inf
        self.watcher: Watcher | None = None
        # Close when all has been sent; or take and drop what it sends until it closes, for closing at once would reset
        # the connection, and the answer might never be read.
        self.closes = False
        self.lingers = False
        # More requests may have arrived than were answered.
        self.has_more = False
        self.registered = self.events
        self._dirty = dirty

    @property
    def events(self) -> int:
        """What to wait for; one that does not take its answers is not asked for more requests."""
        events = self.connection.events
        return events if self.is_asked() else events & ~selectors.EVENT_READ

    @property
    def is_answered(self) -> bool:
        """Whether its requests are: a watch is its last one."""
        return not (self.watcher or self.closes or self.lingers)

    def is_asked(self) -> bool:
        """Whether it may send more."""
        return self.has_room() and not self.has_more

    def has_room(self) -> bool:
        return len(self.connection.outgoing) < OUTGOING_BYTES_MAX

    def read(self) -> None:
        """What has arrived, which is dropped where no request is waited for. Raises Closed."""
        data = self.connection.read(READ_BYTES_MAX if self.is_known else STRANGERS_READ_BYTES_MAX)
        if self.is_answered:
            self.reader.feed(data)

    def write(self, now_s: float) -> None:
        """Send what fits of what waits. Raises Closed."""
        if self.connection.write() or self.moved_s > now_s:
            self.moved_s = now_s
        if not self.connection.outgoing:
            self.moved_s = math.inf

    def is_stalled(self, since_s: float) -> bool:
        """It has taken nothing of what waits for it since then."""
        return bool(self.connection.outgoing) and self.moved_s < since_s

    def send(self, line: bytes) -> None:
        """A line of its watch."""
        self.put(chunk(line))

    def put(self, data: bytes) -> None:
        self.connection.outgoing += data
        self._dirty[self] = None
