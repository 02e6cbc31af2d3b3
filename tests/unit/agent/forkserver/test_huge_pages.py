"""A process's memory in huge pages: the same bytes, in another table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import json, sys
from elaunch.agent.forkserver import huge_pages
def huge():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("AnonHugePages"))
kept = bytearray(b"elaunch " * (4 << 20))
before = huge()
pages = huge_pages.SmallPages()
{"at once": pages.collapse, "beside a job": lambda: pages.collapse_beside(0.1)}[sys.argv[1]]()
print(json.dumps([before, huge(), kept == b"elaunch " * (4 << 20)]))
"""


@pytest.mark.parametrize("how", ["at once", "beside a job"])
def test_a_process_goes_on_with_the_same_memory_in_huge_pages_where_the_kernel_has_them(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=180, check=True)

    before, after, is_same = json.loads(done.stdout)
    assert is_same
    kernel = tuple(map(int, os.uname().release.split(".")[:2]))
    if kernel >= (6, 1) and _asks_for_advice():
        assert (before, after >= 16) == (0, True)


# Prints the MB of huge pages before and after blocks of C's heap are filled, and whether the blocks are as they were
# filled. Some are given back meanwhile, so that others take their places.
HEAP = """
import ctypes, json, resource, sys
from elaunch.agent.forkserver import huge_pages
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
def huge():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("AnonHugePages"))
before = huge()
huge_pages.prepare_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
blocks = {}
for number in range(60000):
    blocks[number] = place = libc.malloc(1000)
    ctypes.memset(place, number % 251, 1000)
    if number % 3 == 2:
        libc.free(blocks.pop(number - 1))
same = all(ctypes.string_at(place, 1000) == bytes([number % 251]) * 1000 for number, place in blocks.items())
print(json.dumps([before, huge(), same]))
"""


@pytest.mark.parametrize("limit", ["free", "limited"])
def test_the_heap_of_a_process_grows_in_huge_pages_unless_its_memory_is_limited(limit: str) -> None:
    done = subprocess.run([sys.executable, "-c", HEAP, limit], capture_output=True, text=True, timeout=180, check=True)

    before, after, is_same = json.loads(done.stdout)
    assert is_same
    if _asks_for_advice() and os.confstr("CS_GNU_LIBC_VERSION"):
        assert (before, after >= 30) == (0, limit == "free")


def _asks_for_advice() -> bool:
    return _SETTING.exists() and "[madvise]" in _SETTING.read_text()
