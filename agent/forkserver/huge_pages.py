"""Puts the memory of a fork server into huge pages, where nobody waits for it.

A fork then copies a page table of some hundred entries, not of 50,000, and the end of a forked process goes through as
few. The kernel copies the memory for that: 0.1 to 0.4 s of CPU time, so it is not done before a job's first worker.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# From Linux 6.1 on. Older kernels refuse it.
_MADV_COLLAPSE = 25
_PAGE_BYTES = 1 << 21
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def collapse(wait_per_work: float = 0.0) -> None:
    """Do it, as far as the kernel does. Wait after each page for so many times as long as it took."""
    with suppress(OSError, AttributeError):
        if "[never]" in _SETTING.read_text():
            # This host's administrator wants none.
            return
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        step = _PAGE_BYTES if wait_per_work else 0
        for start, end in _own_memory():
            for place in range(start, end, step or end - start):
                began_s = time.monotonic()
                madvise(place, step or end - start, _MADV_COLLAPSE)
                if wait_per_work:
                    time.sleep(wait_per_work * (time.monotonic() - began_s))


def _own_memory() -> Iterator[tuple[int, int]]:
    """The parts of this process's memory that could be huge pages: from where to where."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        place, access, *_ = line.split(maxsplit=2)
        if access == "rw-p":
            start, end = (int(each, 16) for each in place.split("-"))
            start, end = -(-start // _PAGE_BYTES) * _PAGE_BYTES, end // _PAGE_BYTES * _PAGE_BYTES
            if end > start:
                yield start, end
