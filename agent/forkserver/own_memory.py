"""This process's own memory, as the kernel shows it, and what the kernel is asked to do with parts of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

# The advice to take pages back: they are as new at their next use.
DONTNEED = 4


def writable() -> Iterator[tuple[int, int]]:
    """The parts that this process may write to and shares with no other: from where to where."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        place, access, *_ = line.split(maxsplit=2)
        if access == "rw-p":
            start, end = place.split("-")
            yield int(start, 16), int(end, 16)


def madvise(start: int, end: int, advice: int) -> None:
    """Give the kernel this advice about a part. It may refuse. Raises AttributeError without a C library's madvise."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call(start, end - start, advice)
