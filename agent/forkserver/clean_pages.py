"""Lets go of the pages of files that this process has mapped and not changed: the libraries of its imports.

A fork server has used them once, while it imported. The kernel still counts them as its memory, 100 MB with torch. They
stay in the kernel's cache, where workers find theirs: a fork hands on no page of a file that nobody has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from elaunch.agent.forkserver.own_memory import DONTNEED, madvise


def let_go() -> None:
    """Do it. A page that is used after all is mapped again then."""
    # Unknown before Linux 4.5, and hidden by some sandboxes.
    with suppress(OSError, AttributeError):
        for start, end in clean_mappings(Path("/proc/self/smaps").read_text(errors="replace")):
            madvise(start, end, DONTNEED)


def clean_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Where a process has mapped a file and has not changed a page: from where to where, by its `smaps`.

    One that is read-only may have changed pages: the loader writes addresses there first (RELRO).
    """
    place: tuple[int, int] | None = None
    for line in smaps.splitlines():
        name, *words = line.split(maxsplit=5)
        if not name.endswith(":"):
            is_file = len(words) == 5 and words[4].startswith("/") and words[0] in ("r--p", "r-xp")
            start, end = (int(each, 16) for each in name.split("-"))
            place = (start, end) if is_file else None
        elif name == "Anonymous:" and place and words[0] == "0":
            yield place
