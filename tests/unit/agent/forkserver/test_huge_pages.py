"""A process's memory in huge pages: the same bytes, in another table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
from elaunch.agent.forkserver import huge_pages
def huge():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("AnonHugePages"))
kept = bytearray(b"elaunch " * (4 << 20))
before = huge()
huge_pages.collapse(float(sys.argv[1]))
print(json.dumps([before, huge(), kept == b"elaunch " * (4 << 20)]))
"""


@pytest.mark.parametrize("wait_per_work", ["0", "0.1"])
def test_a_process_goes_on_with_the_same_memory_in_huge_pages_where_the_kernel_has_them(wait_per_work: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, wait_per_work], capture_output=True, text=True, timeout=180, check=True
    )

    before, after, is_same = json.loads(done.stdout)
    assert is_same
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    kernel = tuple(map(int, os.uname().release.split(".")[:2]))
    if kernel >= (6, 1) and setting.exists() and "[madvise]" in setting.read_text():
        assert (before, after >= 16) == (0, True)
