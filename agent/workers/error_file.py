"""Reads a worker's TORCHELASTIC_ERROR_FILE: the program owns the path, and may have put anything there."""

from __future__ import annotations

import os
import stat

# Python's text of an exception is in the record twice. The agent's loop stands still while a record is read.
BYTES_MAX = 32 << 20


def read_error_file(path: str | os.PathLike[str]) -> str | None:
    """The record in the file; "" if it is too large to be one, None if there is no regular file.

    A pipe would wait for its writer, and a device has no end: neither is opened for reading.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        if found.st_size > BYTES_MAX:
            return ""
        # The program may write to it still: no more than that is taken.
        with open(fd, "rb", closefd=False) as file:
            content = file.read(BYTES_MAX)
    except OSError:
        return None
    finally:
        os.close(fd)
    return content.decode(errors="replace")
