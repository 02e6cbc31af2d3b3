"""Makes whole lines of a byte stream, each with its rank's prefix."""

from __future__ import annotations

import re

# A line's end that another line follows, and the moves and erasures with which a progress bar begins that line.
_MOVES = rb"(?:\x1b\[\d*[AGJK]|\x1b\[\?25[hl])*"
_BETWEEN = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?!" + _MOVES + rb"\Z)" + _MOVES)
_FIRST = re.compile(_MOVES)
# A line longer than this is passed on in pieces: no buffer is without a bound.
LINE_BYTES_MAX = 1 << 20


class LineSplitter:
    """Collects bytes and gives back whole lines; `\\r` ends a line too, so that progress bars move.

    No byte is lost or changed: the results of `whole` and `rest`, joined, are the input.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> bool:
        """Whether a partial line waits."""
        return bool(self._rest)

    def whole(self, data: bytes) -> bytes:
        """All lines that `data` completes, as one run of bytes that ends at a line's end (or is empty)."""
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if data.endswith(b"\r"):
            # The \n of a \r\n may follow. If it does not, rest() returns the \r later.
            end = max(data.rfind(b"\n", 0, -1), data.rfind(b"\r", 0, -1)) + 1
        if not end and len(data) > LINE_BYTES_MAX:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """The partial line, for a caller that no longer waits for the end of the line."""
        rest, self._rest = self._rest, b""
        return rest


def prefixed(lines: bytes, prefix: bytes, *, continued: bool) -> bytes:
    """`lines` with `prefix` before each. `continued` says that the first line continues a line printed before.

    The prefix of a progress bar comes after what erases the bar's last state.
    """
    if not prefix:
        return lines
    if b"\r" in lines or b"\x1b[" in lines:
        body = _BETWEEN.sub(lambda between: between[0] + prefix, lines)
        first = _moves(lines)
        return body if continued or first == len(lines) else body[:first] + prefix + body[first:]
    body = lines[:-1].replace(b"\n", b"\n" + prefix) + lines[-1:]
    return body if continued else prefix + body


def leaves_open(lines: bytes) -> bool:
    """Whether the last line has begun and has no end."""
    last = lines[max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1 :]
    return _moves(last) < len(last)


def _moves(line: bytes) -> int:
    """How many bytes of moves and erasures the line begins with."""
    found = _FIRST.match(line)
    return found.end() if found else 0
