"""The socket at which this user's processes on this host ask the agent: one line of JSON each way, then it closes.

The agent's loop reads it, so nobody wakes up while nobody asks. It lies in a folder that only its user can enter, and
the guardian removes that folder.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from elaunch.agent.linux import credentials as credentials
from elaunch.agent.linux import start_thread
from elaunch.strict_json import parse_json

SOCKET_NAME = "agent"
_REQUEST_BYTES_MAX = 4096
# Connections that have not asked yet. The oldest goes when another one comes.
_WAITING_MAX = 8
# Connections that the kernel holds while the loop is busy.
_BACKLOG = 64
# A process that asks and does not read is let go of after this long.
_READ_S = 5.0


class Asked:
    """One request, and the way back; `topic` is what the line asked for. Any thread may call `reply`, once."""

    def __init__(self, topic: str, connection: socket.socket) -> None:
        self.topic = topic
        self._connection = connection

    def reply(self, text: str) -> bool:
        """Send one line and close; return whether the asker still waits.

        What the socket does not take at once, a thread sends.
        """
        data = text.encode() + b"\n"
        try:
            sent = self._connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            self._connection.close()
            return False
        if sent == len(data) or not start_thread(lambda: self._send(data[sent:]), "elaunch-answer"):
            self._connection.close()
        return True

    def _send(self, rest: bytes) -> None:
        with self._connection, suppress(OSError):
            self._connection.settimeout(_READ_S)
            self._connection.sendall(rest)


class LocalSocket:
    """The listening socket, in the first of `folders` that takes one. `path` is None where none does.

    `asked` is called by the loop for each request.
    """

    def __init__(
        self, folders: Iterable[Path], selector: selectors.BaseSelector, asked: Callable[[Asked], None]
    ) -> None:
        self._selector = selector
        self._asked = asked
        self._listener: socket.socket | None = None
        self._waiting: dict[socket.socket, bytes] = {}
        self.path: Path | None = None
        for folder in folders:
            if self._listen(folder / SOCKET_NAME):
                break
            _remove(folder)

    def close(self) -> None:
        """Answer nobody any more, and leave nothing behind."""
        for connection in [*self._waiting]:
            self._drop(connection)
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        if self.path:
            _remove(self.path.parent)

    def _listen(self, path: Path) -> bool:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A path may be too long for a socket's address, and some file systems have no sockets.
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            return False
        self._listener, self.path = listener, path
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return True

    def _accept(self) -> None:
        assert self._listener
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is left for it. The socket would wake the loop for ever.
            self.close()
            return
        if credentials(connection)[1] not in (os.geteuid(), 0):
            connection.close()
            return
        if len(self._waiting) >= _WAITING_MAX:
            self._drop(next(iter(self._waiting)))
        connection.setblocking(False)
        self._waiting[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._waiting:
            return
        try:
            data = connection.recv(_REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        text = self._waiting[connection] + data
        line, newline, _ = text.partition(b"\n")
        if not newline and data and len(text) <= _REQUEST_BYTES_MAX:
            self._waiting[connection] = text
            return
        topic = _topic(line) if newline else None
        if topic is None:
            self._drop(connection)
            return
        self._selector.unregister(connection)
        del self._waiting[connection]
        self._asked(Asked(topic, connection))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]
        connection.close()


def _topic(line: bytes) -> str | None:
    try:
        request = parse_json(line)
    except ValueError:
        return None
    match request:
        case {"ask": str(topic)}:
            return topic
    return None


def _remove(folder: Path) -> None:
    # The claim on the folder is a file in it, which the agent's guardian removes if this does not.
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
