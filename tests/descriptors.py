"""What this process has open, for tests that nothing stays open.

A number of descriptors alone may fall meanwhile, with what earlier tests have left to the garbage collector.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path


def opened() -> Counter[str]:
    """How many descriptors each file, pipe and socket has, by the kernel's name for it, such as `pipe:[4711]`.

    `not opened() - before` says that nothing has been left open since `before`.
    """
    found: Counter[str] = Counter()
    folder = Path("/proc/self/fd")
    for path in folder.iterdir():
        # That of the folder itself is closed by then, or not.
        with suppress(OSError):
            found[str(path.readlink())] += 1
    found.pop(str(folder.resolve()), None)
    return found
