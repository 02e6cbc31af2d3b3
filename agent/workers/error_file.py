"""Reads a worker's TORCHELASTIC_ERROR_FILE: the program owns the path, and may have put anything there."""

from __future__ import annotations

import os
import stat

# The record holds Python's text of the exception twice. The agent's loop waits while a record is read.
BYTES_MAX = 32 << 20


def read_error_file(path: str | os.PathLike[str]) -> str | None:
    """The record in the file. "" if the file is too large to be a record, None if it is no regular file.

    A pipe would wait for its writer, and a device has no end: neither is read.
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
        # The program may still write to the file, so the read has a limit too.
        with open(fd, "rb", closefd=False) as file:
            content = file.read(BYTES_MAX)
    except OSError:
        return None
    finally:
        os.close(fd)
    return content.decode(errors="replace")
