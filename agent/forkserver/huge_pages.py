"""Puts the memory of a fork server into huge pages.

A fork then copies a page table of some hundred entries, not of 50,000, and the end of a forked process goes through as
few. Half of the memory that imports take is C's heap. `prepare_heap` has it in huge pages from its first use, at no
cost. For the rest, `SmallPages` has the kernel copy the memory. That takes 0.7 ms for each 2 MB, or 10 ms in a virtual
machine whose host has not given it that memory yet.
"""

from __future__ import annotations

import ctypes
import math
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from elaunch.agent.forkserver.own_memory import DONTNEED, madvise, writable

# From Linux 6.1 on. Older kernels refuse it.
_MADV_COLLAPSE = 25
_MADV_HUGEPAGE = 14
_PAGE_BYTES = 1 << 21
# What `import torch` takes of C's heap is a little more. Memory that is not used after all costs nothing.
_HEAP_BYTES = 80 << 20
# glibc takes blocks of this size from its heap. It would make a mapping for each from 128 KiB on.
_BLOCK_BYTES = 120 << 10
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def prepare_heap() -> None:
    """Have C's heap use huge pages for what is allocated next. This process must have one thread.

    A page is huge if the kernel knows of its two megabytes when the first of them is used. But glibc lets its heap grow
    by less. So the heap is made larger once, by blocks that are freed again. The last block stays, or the heap would
    shrink. The freed blocks become one free chunk. glibc needs only its first and its last words: the kernel takes back
    the pages in between, and they are huge at their next use.
    """
    with suppress(OSError, AttributeError):
        if "[never]" in _SETTING.read_text() or _is_limited():
            return
        libc = _libc()
        if not hasattr(libc, "gnu_get_libc_version"):
            return
        end, blocks = libc.sbrk(0), (ctypes.c_void_p * (_HEAP_BYTES // _BLOCK_BYTES))()
        for number in range(len(blocks)):
            blocks[number] = libc.malloc(_BLOCK_BYTES)
        # Not of another heap than glibc's (LD_PRELOAD), and with nothing of others in between.
        grown = [block for block in blocks if block and end <= block < libc.sbrk(0)]
        is_one = len({after - before for before, after in pairwise(grown)}) == 1 and grown[-1] == blocks[-1]
        pages = [*_whole_pages(grown[0] + _BLOCK_BYTES, grown[-1])] if is_one else []
        for block in blocks[:-1]:
            libc.free(block)
        for start, stop in pages:
            madvise(start, stop, DONTNEED)
            madvise(start, stop, _MADV_HUGEPAGE)


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.sbrk.argtypes = (ctypes.c_size_t,), (ctypes.c_ssize_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    return libc


def _is_limited() -> bool:
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


class SmallPages:
    """The memory of this process, as it is when this is made, that may not be in huge pages yet."""

    def __init__(self) -> None:
        self._places: Iterator[int] = iter(())
        with suppress(OSError, AttributeError):
            # Another setting is the wish of this host's administrator.
            if "[never]" not in _SETTING.read_text():
                pages = (each for part in writable() for each in _whole_pages(*part))
                self._places = (place for start, end in pages for place in range(start, end, _PAGE_BYTES))

    def collapse(self, for_s: float = math.inf) -> float | None:
        """Put it into huge pages, as far as the kernel does, for so long, but one page at least.

        Returns the seconds that it took, or None if nothing is left.
        """
        began_s = time.monotonic()
        for place in self._places:
            madvise(place, place + _PAGE_BYTES, _MADV_COLLAPSE)
            if (took_s := time.monotonic() - began_s) >= for_s:
                return took_s
        return None

    def collapse_beside(self, wait_per_work: float) -> None:
        """Do it beside a job: wait after each page for so many times as long as it took."""
        while (took_s := self.collapse(0.0)) is not None:
            time.sleep(wait_per_work * took_s)


def _whole_pages(start: int, end: int) -> Iterator[tuple[int, int]]:
    """What of it are whole huge pages, if any."""
    start, end = -(-start // _PAGE_BYTES) * _PAGE_BYTES, end // _PAGE_BYTES * _PAGE_BYTES
    if end > start:
        yield start, end
