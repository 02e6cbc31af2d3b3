"""The file in memory into which faulthandler writes a worker's Python stack when the worker crashes."""

from __future__ import annotations

import os
from contextlib import suppress

# faulthandler writes at most 100 frames of each of 100 threads; the newest stack is at the end.
_BYTES_MAX = 256 << 10


class CrashFile:
    """One worker's file. The agent keeps it open, and the worker gets a descriptor of the same file.

    The worker owns what is in it: it may hold anything, and any amount.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("elaunch-crash", os.MFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def read(self) -> str:
        """The end of what was written."""
        with suppress(OSError):
            size = os.fstat(self._fd).st_size
            return os.pread(self._fd, _BYTES_MAX, max(size - _BYTES_MAX, 0)).decode(errors="replace")
        return ""

    def close(self) -> None:
        os.close(self._fd)
