"""Keeps the progress bars of ranks at the bottom of a terminal, below the lines of all others.

A bar is a line that its program writes again after a `\\r`, or rows to which it moves the cursor back, as rich does.
Another rank's line between two states of a bar would stand in the bar, or be erased by the next state.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from elaunch.agent.output.lines import leaves_open, prefixed
from elaunch.agent.terminal import can_move_cursor, terminal_size

# The cursor goes up, is shown (h) or hidden (l). rich hides it as long as its rows live.
_MARK = re.compile(rb"\x1b\[(?:\d*A|\?25([hl]))")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_SHOW_CURSOR = b"\x1b[?25h"
_ERASE_BELOW = b"\r\x1b[J"
# No buffer is without a bound. A screen has less.
_BAR_BYTES_MAX = 64 << 10


class LiveRows:
    """What one terminal shows of writers that share it. `size` tells its columns and rows.

    One bar is on the screen at a time: that which moved last. An open line that is no bar, such as a prompt, stays
    where it is.
    """

    def __init__(self, size: Callable[[], tuple[int, int]]) -> None:
        self._size = size
        # As they were written, since the last move to their first row.
        self._bars: dict[object, bytes] = {}
        self._shown: object = None
        self._open: object = None
        self._hiding: set[object] = set()

    def is_moving(self, writer: object) -> bool:
        """Whether the writer has a bar, so that each of its states is to be seen at once."""
        return writer in self._bars

    def put(self, data: bytes, writer: object, prefix: bytes = b"", instead_of: bytes = b"") -> bytes:
        """What to send to the terminal so that it shows `data`, each line with `prefix` (see `prefixed`)."""
        bar = self._bars.pop(writer, b"")
        is_on_screen = writer is not None and self._shown is writer
        continued = leaves_open(bar) or (writer is not None and self._open is writer)
        lines = prefixed(data, prefix, continued=continued, instead_of=instead_of)
        # A bar that another one has hidden is written again, so that it can go on from there.
        out = lines if is_on_screen else self._make_room(writer) + bar + lines
        self._shown = self._open = None
        rows = self._rows(writer, bar, bar + lines) if writer is not None else None
        if rows is not None:
            self._bars[writer], self._shown = rows, writer
        elif leaves_open(lines if continued or b"\n" in lines else bar + lines):
            self._open = writer
        is_taken = self._shown is not None or self._open is not None
        return out if is_taken else out + self._show_last()

    def leave(self, writer: object) -> bytes:
        """What to send when the writer is gone: its bar stays as it is, and the cursor is shown again."""
        bar, out = self._bars.pop(writer, b""), b""
        if self._shown is writer:
            self._shown = None
            out = (b"\n" if leaves_open(bar) else b"") + self._show_last()
        has_hidden = writer in self._hiding
        self._hiding.discard(writer)
        return out + _SHOW_CURSOR if has_hidden and not self._hiding else out

    def _show_last(self) -> bytes:
        """The bar that moved last, if there is one."""
        if not self._bars:
            return b""
        self._shown, rows = list(self._bars.items())[-1]
        return rows

    def _make_room(self, writer: object) -> bytes:
        """What takes another writer's bar off the screen, or ends its open line."""
        if self._open is not None and self._open is not writer:
            return b"\n"
        if self._shown is None:
            return b""
        up = self._height(self._bars[self._shown]) - 1
        return (b"\x1b[%dA" % up if up else b"") + _ERASE_BELOW

    def _rows(self, writer: object, bar: bytes, written: bytes) -> bytes | None:
        """The rows that the writer may still change; None if it has no bar."""
        marks = list(_MARK.finditer(written)) if b"\x1b[" in written else []
        for mark in marks:
            if mark[1] == b"l":
                self._hiding.add(writer)
            elif mark[1] == b"h":
                self._hiding.discard(writer)
        rows = written[marks[-1].end() :] if marks else written
        if writer in self._hiding:
            rows = rows[rows.rfind(b"\r") + 1 :]
            if self._fits(rows):
                return rows
            self._hiding.discard(writer)
            return None
        row = rows[rows.rfind(b"\n") + 1 :]
        is_above = bool(marks) and marks[-1][0].endswith(b"A")
        is_bar = b"\r" in row or (b"\n" not in rows and (is_above or leaves_open(bar)))
        if not is_bar or not self._fits(row):
            return None
        states = row.split(b"\r")
        # A program may write the \r behind each state.
        return states[-1] or b"".join(states[-2:-1]) + b"\r"

    def _fits(self, rows: bytes) -> bool:
        """Whether the cursor can come back to the first of these rows: it cannot leave the screen."""
        return len(rows) <= _BAR_BYTES_MAX and self._height(rows) < self._size()[1]

    def _height(self, rows: bytes) -> int:
        columns = self._size()[0]
        return sum(max(1, -(-_width(row) // columns)) for row in rows.split(b"\n"))


def live_rows_of(fd: int) -> LiveRows | None:
    """Live rows for a terminal that can move its cursor; None for a file, a pipe and a dumb terminal."""
    return LiveRows(lambda: terminal_size(fd)) if can_move_cursor(fd) else None


def _width(row: bytes) -> int:
    """How many columns the widest state of the row takes."""
    # Imported here: a job without bars never needs it.
    from unicodedata import combining, east_asian_width

    def columns(text: str) -> int:
        wide = sum(east_asian_width(each) in "WF" for each in text if each > "\u02ff")
        return len(text) + wide - sum(combining(each) > 0 for each in text if each > "\u02ff")

    text = _CONTROL.sub("", row.decode(errors="replace"))
    return max(columns(state) for state in text.split("\r"))
