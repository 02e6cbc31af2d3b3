"""HTTP/1.1 for the side that answers: bytes in, requests out, without a socket (RFC 9112, cut down).

Bodies have a Content-Length; answers are whole, or a stream in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

HEAD_BYTES_MAX = 16 << 10
_END = b"\r\n\r\n"


class HttpRequest(NamedTuple):
    """`headers` have lower-case names. `closes`: the client wants no further request to follow on the connection."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    closes: bool


class BadRequest(Exception):
    """What was sent is no request, or too large a one; the connection cannot be used any further."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RequestReader:
    """Puts requests together from what arrives; `body_bytes_max` says how much may follow some headers."""

    def __init__(self, body_bytes_max: Callable[[Mapping[str, str]], int]) -> None:
        self._body_bytes_max = body_bytes_max
        self._buffer = bytearray()
        self._head: tuple[str, str, Mapping[str, str], bool] | None = None
        self._body_length = 0
        self._searched = 0

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
        end = self._buffer.find(_END, max(self._searched - len(_END), 0))
        if max(end, len(self._buffer) if end < 0 else 0) > HEAD_BYTES_MAX:
            raise BadRequest(431, "the request's headers are too long")
        if end < 0:
            self._searched = len(self._buffer)
            return False
        self._searched = 0
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
        if self._body_length > self._body_bytes_max(headers):
            raise BadRequest(413, "the request is too large")
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


def whole(status: int, body: bytes, closes: bool = False) -> bytes:
    """An answer; `closes` tells the client that none will follow."""
    kind = "application/json" if body.startswith(b"{") else "text/plain; charset=utf-8"
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return (head + ("Connection: close\r\n" if closes else "") + "\r\n").encode() + body


def stream_head() -> bytes:
    """The start of an answer in chunks."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
