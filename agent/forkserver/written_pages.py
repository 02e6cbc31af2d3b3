"""Copies ahead, in a process that waits to be a worker, the pages of memory that a worker has written to.

A forked process shares the fork server's pages. At the first write to one the kernel copies it: 2,000 times until a
worker's first all-reduce, a third of its CPU time. The last generation's workers show which pages these will be, since
all have been forked from the same memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from elaunch.agent.forkserver.own_memory import writable

if TYPE_CHECKING:
    from io import RawIOBase

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Bits of an entry of /proc/PID/pagemap (Linux, admin-guide/mm/pagemap.rst): in memory, of a file or shared, and mapped
# by this process alone.
_PRESENT, _OF_FILE, _ALONE = 1 << 63, 1 << 61, 1 << 56
_WRITTEN = _PRESENT | _ALONE


def written_by(pid: int) -> list[int]:
    """The addresses of pages of this process that its forked child has a copy of. Empty if the kernel does not say."""
    with suppress(OSError), open(f"/proc/{pid}/pagemap", "rb", 0) as pagemap:  # noqa: PTH123
        return [page for start, end in writable() for page in _written(pagemap, start, end)]
    return []


def copy(pages: list[int]) -> None:
    """Have this process's own copies of them: write the first byte of each as it is."""
    for page in pages:
        ctypes.memmove(page, page, 1)


def _written(pagemap: RawIOBase, start: int, end: int) -> Iterator[int]:
    pagemap.seek(start // _PAGE_BYTES * 8)
    entries = memoryview(pagemap.read((end - start) // _PAGE_BYTES * 8) or b"").cast("Q")
    for number, entry in enumerate(entries):
        if entry & (_WRITTEN | _OF_FILE) == _WRITTEN:
            yield start + number * _PAGE_BYTES
