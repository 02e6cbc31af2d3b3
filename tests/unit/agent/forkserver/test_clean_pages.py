"""The pages of unchanged files are given back, and none that was changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elaunch.agent.forkserver.clean_pages import clean_mappings
from tests.harness import RUN_LIMIT_S

_SMAPS = """\
7f0000000000-7f0000002000 r-xp 00001000 fe:00 12                         /usr/lib/libc.so.6
Size:                  8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0000002000-7f0000003000 r--p 00003000 fe:00 12                         /usr/lib/lib with space.so (deleted)
Anonymous:             0 kB
7f0000003000-7f0000004000 r--p 00004000 fe:00 12                         /usr/lib/libc.so.6
Anonymous:             4 kB
7f0000004000-7f0000005000 rw-p 00005000 fe:00 12                         /usr/lib/libc.so.6
Anonymous:             0 kB
7f0000005000-7f0000006000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000006000-7f0000007000 r--s 00000000 fe:00 13                         /usr/lib/gconv.cache
Anonymous:             0 kB
7f0000007000-7f0000008000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
"""
# Prints the kB of files' pages in this process, before and after, and what still works.
_PROGRAM = """
import ctypes, re, ssl
from pathlib import Path
from elaunch.agent.forkserver.clean_pages import let_go
def of_files():
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Pss_File: +([0-9]+)", text, re.M)[1])
before = of_files()
let_go()
after = of_files()
print(before, after, len(ssl.create_default_context().get_ciphers()) > 0)
"""


def test_only_mappings_of_files_without_a_changed_page_count() -> None:
    assert list(clean_mappings(_SMAPS)) == [(0x7F0000000000, 0x7F0000002000), (0x7F0000002000, 0x7F0000003000)]


def test_a_process_has_fewer_pages_of_files_afterwards_and_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=RUN_LIMIT_S
    )

    before, after, works = done.stdout.split()
    assert int(after) < int(before) / 2, Path("/proc/version").read_text()
    assert works == "True"
