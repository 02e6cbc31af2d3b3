"""Output of other processes, in whole lines."""

from __future__ import annotations

import os
import select

# A longer line is passed on in pieces, so that buffers are bounded.
LINE_BYTES_MAX = 1 << 20


def split_lines(data: bytes) -> tuple[bytes, bytes]:
    """`data` up to the end of its last whole line, and the rest; `\\r` ends a line too, so that progress bars move."""
    # The \n of a \r\n may follow a \r at the end.
    end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
    if not end and len(data) > LINE_BYTES_MAX:
        end = len(data)
    return data[:end], data[end:]


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, and wait for a slow reader. Raises OSError if the reader is gone or the disk is full."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            # Another process has set the shared stdout to non-blocking. This thread can only wait.
            select.select([], [fd], [])
