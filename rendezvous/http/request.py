"""HTTP/1.1 for the server: bytes in, requests out, without a socket (a part of RFC 9112).

A request's body has a Content-Length. An answer is sent whole, or as a stream of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

HEAD_BYTES_MAX = 4 << 10
_END = b"\r\n\r\n"


class HttpRequest(NamedTuple):
    """`headers` have lower-case names. `closes` says that the client sends no further request on the connection."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    closes: bool


class BadRequest(Exception):
    """The client sent no HTTP request, or one that is refused. Its connection cannot be used any further.

    `body` is the body of the answer.
    """

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
        self._head: tuple[str, str, Mapping[str, str], bool] | None = None
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
        method, path, headers, closes = self._head
        self._head = None
        return HttpRequest(method, path, headers, body, closes)

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
        if version not in ("HTTP/1.0", "HTTP/1.1") or len(headers) < len(fields):
            raise BadRequest(400, "not HTTP/1.1, or a header twice")
        self._body_length = _body_length(headers)
        self._admit(headers, self._body_length)
        closes = version == "HTTP/1.0" or headers.get("connection", "").lower() == "close"
        self._head = (method, target.partition("?")[0], headers, closes)
        return True


def _body_length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise BadRequest(411, "a request's body must have a Content-Length")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise BadRequest(400, "Content-Length is no number")
    return int(text[:19])


def http_response(status: int, body: bytes, closes: bool = False) -> bytes:
    """A whole answer; `closes` tells the client that the server closes the connection.

    Such an answer also has the time (RFC 9110, 6.6.1): a client that asks for nothing else compares its clock by it.
    """
    kind = "application/json" if body.startswith(b"{") else "text/plain; charset=utf-8"
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    closing = f"Date: {formatdate(usegmt=True)}\r\nConnection: close\r\n" if closes else ""
    return f"{head}{closing}\r\n".encode() + body


def stream_head() -> bytes:
    """The head of an answer in chunks."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
