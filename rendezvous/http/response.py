"""HTTP/1.1 answers, parsed as they arrive (RFC 9112): no socket, no clock."""

from __future__ import annotations

import re

HEAD_BYTES_MAX = 1 << 16
_CHUNK_LINE_BYTES_MAX = 1 << 10
# str.isdigit() would take digits that int() does not.
_STATUS = re.compile(r"[1-5][0-9]{2}(?![^ ])")
_LENGTH = re.compile(r"[0-9]{1,18}")
_SIZE_DIGITS_MAX = 16


class Garbled(Exception):
    """The data is no HTTP answer, or ends too early. The message is a sentence without its subject."""


class NotHttp(Garbled):
    """The data does not begin like an HTTP answer; `start` is its beginning."""

    def __init__(self, start: bytes) -> None:
        super().__init__(f"does not speak HTTP: {start[:40]!r}")
        self.start = start


class ResponseReader:
    """Reads one answer to a POST or GET. Pass what arrives to `feed`; it returns the parts of the body.

    `status` is 0 until the head is complete. `finished` says that the body is complete, and `reusable` that another
    request may then follow on the connection.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.finished = False
        self.reusable = False
        self._rest = b""
        # Remaining bytes of the body, or of the current chunk with its line end. None: the body ends with the
        # connection.
        self._left: int | None = 0
        self._chunked = False
        self._trailers = False

    def feed(self, data: bytes) -> bytes:
        """The next piece of the body, b"" if none has arrived yet. Raises Garbled."""
        self._rest += data
        while not self.status:
            if self._head() is False:
                return b""
        if self._chunked:
            return self._chunks()
        body, self._rest = self._rest[: self._left], self._rest[len(self._rest) if self._left is None else self._left :]
        if self._left is not None:
            self._left -= len(body)
            self._finish(self._left == 0)
        return body

    def end(self) -> None:
        """The connection has ended. Raises Garbled if the answer is incomplete."""
        if self.finished:
            return
        if not self.status:
            raise Garbled("ended the connection without an answer" if not self._rest else "ended in mid-answer")
        if self._left is not None or self._chunked:
            raise Garbled("ended in mid-answer")
        self.finished = True

    def _head(self) -> bool | None:
        """Whether the head is complete. None after the head of an interim answer: another head follows."""
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            if not b"HTTP/1.".startswith(self._rest[:7]):
                raise NotHttp(self._rest)
            if len(self._rest) > HEAD_BYTES_MAX:
                raise Garbled(f"sent a head of more than {HEAD_BYTES_MAX} bytes")
            return False
        first, *lines = self._rest[:end].decode("latin-1").split("\r\n")
        self._rest = self._rest[end + 4 :]
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not _STATUS.match(status):
            raise NotHttp(first.encode("latin-1"))
        if status[0] == "1":
            # An interim answer; the final one follows.
            return None
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status = int(status[:3])
        self._framing(version)
        return True

    def _framing(self, version: str) -> None:
        length = self.headers.get("content-length", "")
        self._chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        self.reusable = version != "HTTP/1.0" and self.headers.get("connection", "").lower() != "close"
        if self._chunked:
            return
        if self.status in (204, 304):
            length = "0"
        if not length:
            self._left, self.reusable = None, False
        elif _LENGTH.fullmatch(length):
            self._left = int(length)
            self._finish(self._left == 0)
        else:
            raise Garbled(f"sent a Content-Length of {length[:40]!r}")

    def _chunks(self) -> bytes:
        body = b""
        while self._rest and not self.finished:
            if self._left:
                piece = self._rest[: self._left]
                self._rest = self._rest[len(piece) :]
                # The line end that follows the chunk counts as its last two bytes.
                body += piece[: max(self._left - 2, 0)]
                self._left -= len(piece)
                continue
            line, end, rest = self._rest.partition(b"\r\n")
            if not end:
                if len(line) > _CHUNK_LINE_BYTES_MAX:
                    raise Garbled("sent a chunk without a size")
                break
            self._rest = rest
            if self._trailers:
                self._finish(not line)
            else:
                size = _size(line)
                self._left, self._trailers = (size + 2, False) if size else (0, True)
        return body

    def _finish(self, finished: bool) -> None:
        self.finished = finished
        # Data after the answer belongs to no request, so the connection cannot be used again.
        self.reusable = self.reusable and not (finished and self._rest)


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > _SIZE_DIGITS_MAX or digits.strip(b"0123456789abcdefABCDEF"):
        raise Garbled(f"sent a chunk of size {line[:40]!r}")
    return int(digits, 16)


def request(method: str, host: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    """A request with its body. Raises ValueError if a header contains a line break."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if value]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header holds a line break")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
