"""One client's connection to a served store: its requests, and the data that waits to be sent."""

from __future__ import annotations

import math
import selectors

from elaunch.rendezvous.http.request import RequestReader, chunk
from elaunch.rendezvous.server.connection import READ_BYTES_MAX, UNAUTHENTICATED_READ_BYTES_MAX, Connection
from elaunch.rendezvous.server.watchers import Watcher

# While this much data waits to be sent on a connection, its watch gets no further changes.
OUTGOING_BYTES_MAX = 1 << 20


class ConnectedClient:
    """One client. Its requests are answered in order; a watch is the last one.

    `dirty` holds all clients of the server for which data waits to be sent. This client adds itself.
    """

    def __init__(
        self, connection: Connection, address: str, reader: RequestReader, dirty: dict[ConnectedClient, None]
    ) -> None:
        self.connection = connection
        self.address = address
        self.reader = reader
        # This client has sent a complete request with the secret.
        self.is_known = False
        # When to close it, unless another request is complete before. The deadline before the first authenticated
        # request is in `UnauthenticatedConnections`.
        self.deadline_s = math.inf
        # When data was last sent to the client, or began to wait.
        self.moved_s = math.inf
        self.watcher: Watcher | None = None
        # `closes`: close when all data has been sent. `lingers`: read and drop data until the client closes. If the
        # server closed at once, the kernel would reset the connection, and the client might never read the answer.
        self.closes = False
        self.lingers = False
        # Requests that have arrived may still be unanswered.
        self.has_more = False
        self.registered = self.events
        self._dirty = dirty

    @property
    def events(self) -> int:
        """The events to wait for. Nothing is read from a client that does not read its answers."""
        events = self.connection.events
        return events if self.is_asked() else events & ~selectors.EVENT_READ

    @property
    def is_answered(self) -> bool:
        """Whether further requests are answered: not after a watch, and not while the connection is being closed."""
        return not (self.watcher or self.closes or self.lingers)

    def is_asked(self) -> bool:
        """Whether further requests are read now."""
        return self.has_room() and not self.has_more

    def has_room(self) -> bool:
        return len(self.connection.outgoing) < OUTGOING_BYTES_MAX

    def read(self) -> None:
        """Read the data that has arrived, and drop it if no request is expected. Raises Closed."""
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
        """Whether data waits for the client, and none of it was sent after `since_s`."""
        return bool(self.connection.outgoing) and self.moved_s < since_s

    def send(self, line: bytes) -> None:
        """Send a line of the watch."""
        self.put(chunk(line))

    def put(self, data: bytes) -> None:
        self.connection.outgoing += data
        self._dirty[self] = None
