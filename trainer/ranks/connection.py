"""One TCP connection between two ranks: bytes that wait to be sent, and bytes that have arrived."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

Bytes: TypeAlias = "bytes | bytearray | memoryview"
# A read takes at most this much, so that what is passed on goes out while more comes in.
_READ_BYTES = 1 << 20


class BrokenConnection(Exception):
    """The connection to `peer` has failed. `error` says why; None if the other end has closed it."""

    def __init__(self, peer: RankConnection, error: OSError | None = None) -> None:
        super().__init__(f"the connection to rank {peer.rank} is closed")
        self.peer, self.error = peer, error

    @property
    def why(self) -> str:
        """A few words in brackets, or nothing."""
        return "" if self.error is None else f" ({self.error.strerror or self.error})"


class RankConnection:
    """The connection to `rank`. Nothing here waits."""

    def __init__(self, rank: int, made: socket.socket) -> None:
        self.rank, self.socket = rank, made
        self._outgoing: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def queue(self, parts: Iterable[Bytes]) -> None:
        """Send these after what is waiting already. They must not change until `write` has returned True."""
        self._outgoing += [memoryview(part).cast("B") for part in parts if len(part)]

    def write(self) -> bool:
        """Send what the kernel takes now. Returns whether that is all; raises BrokenConnection."""
        try:
            while self._outgoing:
                first = self._outgoing[0]
                sent = self.socket.send(first)
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                else:
                    self._outgoing.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            raise BrokenConnection(self, error) from error
        return True

    def read(self, into: memoryview) -> int:
        """Read what has arrived, as far as it fits. Returns the number of bytes, 0 if there are none.

        Raises BrokenConnection, also when the other end has closed the connection and all it sent is read.
        """
        try:
            count = self.socket.recv_into(into[:_READ_BYTES])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise BrokenConnection(self, error) from error
        if not count:
            raise BrokenConnection(self)
        return count
