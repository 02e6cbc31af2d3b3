"""One client of a served store: HTTP/1.1 (a part of RFC 9112), and its non-blocking connection with TLS.

A request's body has a Content-Length. A response is sent whole, or as a stream of chunks.
"""

from __future__ import annotations

import math
import selectors
import socket
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from elaunch.rendezvous.server.routes import Watcher

HEAD_BYTES_MAX = 4 << 10
_END = b"\r\n\r\n"
# The head of a response in chunks.
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


class HttpRequest(NamedTuple):
    """A whole request, without its headers."""

    method: str
    path: str
    body: bytes


class BadRequest(Exception):
    """The client sent no HTTP request, or one that is refused with `body`. Its connection is not used any further."""

    def __init__(self, status: int, body: str | bytes) -> None:
        self.status = status
        self.body = body if isinstance(body, bytes) else f"{body}\n".encode()
        super().__init__(self.body)


class RequestReader:
    """Assembles requests from the bytes that arrive.

    `admit` is called with each request's headers and its body's length, before the body is read. It raises BadRequest
    to refuse the request.
    """

    def __init__(self, admit: Callable[[Mapping[str, str], int], None]) -> None:
        self._admit = admit
        self._buffer = bytearray()
        self._head: tuple[str, str] | None = None
        self._body_length = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> HttpRequest | None:
        """The next whole request, or None until more has arrived. Raises BadRequest."""
        if self._head is None and not self._read_head():
            return None
        assert self._head
        if len(self._buffer) < self._body_length:
            return None
        body = bytes(self._buffer[: self._body_length])
        del self._buffer[: self._body_length]
        method, path = self._head
        self._head = None
        return HttpRequest(method, path, body)

    def _read_head(self) -> bool:
        end = self._buffer.find(_END)
        if max(end, len(self._buffer) if end < 0 else 0) > HEAD_BYTES_MAX:
            raise BadRequest(431, "the request's headers are too long")
        if end < 0:
            return False
        line, *fields = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + len(_END)]
        try:
            method, target, version = line.split(" ")
            names_values = [field.split(":", 1) for field in fields]
            headers = {name.lower(): value.strip() for name, value in names_values}
        except ValueError:
            raise BadRequest(400, "not HTTP") from None
        if version != "HTTP/1.1" or len(headers) < len(fields):
            raise BadRequest(400, "not HTTP/1.1, or a duplicate header")
        self._body_length = _body_length(headers)
        self._admit(headers, self._body_length)
        self._head = method, target.partition("?")[0]
        return True


def _body_length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise BadRequest(411, "a request's body must have a Content-Length")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise BadRequest(400, "Content-Length is not a number")
    return int(text[:19])


def http_response(status: int, body: bytes, closes: bool = False) -> bytes:
    """A whole response; `closes` announces that the server closes the connection."""
    kind = "application/json" if body.startswith(b"{") else "text/plain; charset=utf-8"
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    closing = "Connection: close\r\n" if closes else ""
    return f"{head}{closing}\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_READ_BYTES = 64 << 10
# Reading more from one connection at a time would starve the others. Without authentication, one TLS record is read.
_READ_BYTES_MAX = 8 * _READ_BYTES
_UNAUTHENTICATED_READ_BYTES_MAX = 16 << 10
# While this much data waits to be sent on a connection, its watch gets no further changes.
OUTGOING_BYTES_MAX = 1 << 20
# The connection to a host that disappeared is closed after about this long, even while nothing is sent.
_DEAD_AFTER_S = 20


class Closed(Exception):
    """The peer has closed the connection, or never spoke TLS."""


class Connection:
    """One client. Its requests are carried out in order; a watch is the last one.

    Call `begin` before the first `read`: it sets up TLS, which a connection that is never read does not need. `dirty`
    holds all clients of the server for which data waits to be sent. This one adds itself.
    """

    def __init__(
        self, accepted: socket.socket, tls: ssl.SSLContext, reader: RequestReader, dirty: dict[Connection, None]
    ) -> None:
        accepted.setblocking(False)
        _tune(accepted)
        self.socket = accepted
        self.outgoing = bytearray()
        self.reader = reader
        # This client has sent a complete request with the secret.
        self.is_known = False
        # When to close it, unless another request is complete first. The deadline before the first authenticated
        # request is in `Unauthenticated`.
        self.deadline_s = math.inf
        # When data was last sent to the client, or began to wait.
        self.moved_s = math.inf
        self.watcher: Watcher | None = None
        # After a refusal: read and drop data until the client closes. If the server closed immediately, the kernel
        # would reset the connection, and the client might never read the response.
        self.lingers = False
        self._tls = tls
        self._handshake_done = False
        self._wants = selectors.EVENT_READ
        self._dirty = dirty
        self.registered = self.events

    def begin(self) -> None:
        """Wrap the socket in TLS: a new `socket` for the same descriptor. Raises Closed."""
        try:
            self.socket = self._tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:
            raise Closed from error

    @property
    def events(self) -> int:
        """The events to wait for, of `selectors`. Nothing is read from a client that does not read its responses."""
        events = self._wants | (selectors.EVENT_WRITE if self.outgoing else 0)
        return events if self.has_space() else events & ~selectors.EVENT_READ

    @property
    def takes_requests(self) -> bool:
        """Whether further requests are carried out: not after a watch, and not after a refusal."""
        return not (self.watcher or self.lingers)

    def has_space(self) -> bool:
        return len(self.outgoing) < OUTGOING_BYTES_MAX

    def read(self) -> None:
        """Read the data that has arrived, and drop it if no request is expected. Raises Closed at the end."""
        bytes_max = _READ_BYTES_MAX if self.is_known else _UNAUTHENTICATED_READ_BYTES_MAX
        pieces: list[bytes] = []
        size = 0
        assert isinstance(self.socket, ssl.SSLSocket)
        try:
            if not self._handshake_done:
                self.socket.do_handshake()
                self._handshake_done = True
            # No selector sees the data that TLS holds decrypted, so all of it is read here.
            while size < bytes_max or self.socket.pending() > 0:
                piece = self.socket.recv(min(_READ_BYTES, bytes_max))
                if not piece:
                    raise Closed
                pieces.append(piece)
                size += len(piece)
        except ssl.SSLWantReadError:
            self._wants = selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            self._wants = selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError as error:
            raise Closed from error
        except Closed:
            if not pieces:
                raise
        if self.takes_requests:
            self.reader.feed(b"".join(pieces))

    def write(self, now_s: float) -> None:
        """Send as much of the waiting data as the connection takes. Raises Closed."""
        before = len(self.outgoing)
        try:
            while self.outgoing:
                with memoryview(self.outgoing) as view:
                    sent = self.socket.send(view[:_READ_BYTES])
                del self.outgoing[:sent]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            raise Closed from error
        if len(self.outgoing) < before or self.moved_s > now_s:
            self.moved_s = now_s
        if not self.outgoing:
            self.moved_s = math.inf

    def is_stalled(self, since_s: float) -> bool:
        """Whether data waits for the client, and none of it was sent after `since_s`."""
        return bool(self.outgoing) and self.moved_s < since_s

    def send(self, line: bytes) -> None:
        """Send a line of the watch."""
        self.put(chunk(line))

    def put(self, data: bytes) -> None:
        self.outgoing += data
        self._dirty[self] = None

    def close(self) -> None:
        self.socket.close()


def _tune(accepted: socket.socket) -> None:
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 2)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_AFTER_S // 4)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_S * 1000)
