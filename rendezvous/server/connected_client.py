"""One client's connection to a served store: its requests, and what waits to be sent to it."""

from __future__ import annotations

import math
import selectors

from elaunch.rendezvous.http.request import RequestReader, chunk
from elaunch.rendezvous.server.connection import READ_BYTES_MAX, UNAUTHENTICATED_READ_BYTES_MAX, Connection
from elaunch.rendezvous.server.watchers import Watcher

# With this much waiting to be sent on its connection, a watch gets no more changes until some of it is sent.
OUTGOING_BYTES_MAX = 1 << 20


class ConnectedClient:
    """One client. Its requests are answered in order; a watch is the last one.

    `dirty` are all clients of the server for which something waits to be sent. This one adds itself.
    """

    def __init__(
        self, connection: Connection, address: str, reader: RequestReader, dirty: dict[ConnectedClient, None]
    ) -> None:
        self.connection = connection
        self.address = address
        self.reader = reader
        # This client has sent a complete request with the secret.
        self.is_known = False
        # When to close it unless another request is complete before. `Strangers` has the deadlines of strangers.
        self.deadline_s = math.inf
        # When data was last sent to it, or began to wait.
        self.moved_s = math.inf
        self.watcher: Watcher | None = None
        # `closes`: close when all has been sent. `lingers`: read and drop what it sends until it closes; the connection
        # would be reset if it were closed at once, and the answer might never be read.
        self.closes = False
        self.lingers = False
        # Requests that have arrived may be left to answer.
        self.has_more = False
        self.registered = self.events
        self._dirty = dirty

    @property
    def events(self) -> int:
        """What to wait for. Nothing is read from a client that does not take its answers."""
        events = self.connection.events
        return events if self.is_asked() else events & ~selectors.EVENT_READ

    @property
    def is_answered(self) -> bool:
        """Whether its requests are still answered: not after a watch, and not while it is being closed."""
        return not (self.watcher or self.closes or self.lingers)

    def is_asked(self) -> bool:
        """Whether its next requests are read."""
        return self.has_room() and not self.has_more

    def has_room(self) -> bool:
        return len(self.connection.outgoing) < OUTGOING_BYTES_MAX

    def read(self) -> None:
        """Read what has arrived, and drop it if no request is expected. Raises Closed."""
        data = self.connection.read(READ_BYTES_MAX if self.is_known else UNAUTHENTICATED_READ_BYTES_MAX)
        if self.is_answered:
            self.reader.feed(data)

    def write(self, now_s: float) -> None:
        """Send as much of the waiting data as the connection takes. Raises Closed."""
        if self.connection.write() or self.moved_s > now_s:
            self.moved_s = now_s
        if not self.connection.outgoing:
            self.moved_s = math.inf

    def is_stalled(self, since_s: float) -> bool:
        """Whether data waits for it of which it has taken nothing since then."""
        return bool(self.connection.outgoing) and self.moved_s < since_s

    def send(self, line: bytes) -> None:
        """Send a line of its watch."""
        self.put(chunk(line))

    def put(self, data: bytes) -> None:
        self.connection.outgoing += data
        self._dirty[self] = None
