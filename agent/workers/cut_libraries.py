"""Removes what a killed compiler leaves in torch's caches: a library without content, on which all later runs fail.

The linker makes `….so` when it begins, and writes it at its end. torch takes a library that is there for one that is
whole: "file too short". No builder will complete a file that is empty or no library, and that nobody has open.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from elaunch.agent.workers.held_files import held, is_on_local_disk

_MAGIC = b"\x7fELF"
# The linker may close a file for a moment.
_LOOK_AGAIN_S = 0.05


def remove_cut(root: str, depth: int, say: Callable[[str], None]) -> None:
    """Remove the libraries in this cache of torch's that no builder will complete, and name each.

    They lie at most `depth` folders deep. Only this user's files on a disk of this host alone are removed. The disk may
    hang, so this is not for the agent's loop.
    """
    cut = [path for path in _libraries(root, depth) if _is_cut(path)]
    if cut:
        time.sleep(_LOOK_AGAIN_S)
    for path in cut:
        with suppress(OSError), held(path) as fd:
            if fd >= 0 and _has_no_library(fd):
                path.unlink()
                say(f"removed {path}: a compiler that was killed had left it without content, and torch cannot load it")


def _libraries(folder: str, depth: int) -> Iterator[Path]:
    """The libraries of this user, in folders of this user: another user's folder may lead anywhere."""
    with suppress(OSError):
        if os.lstat(folder).st_uid != os.geteuid():
            return
        for entry in os.scandir(folder):
            if entry.name.endswith(".so") and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)
            elif depth and entry.is_dir(follow_symlinks=False):
                yield from _libraries(entry.path, depth - 1)


def _is_cut(path: Path) -> bool:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not _has_no_library(fd) or os.fstat(fd).st_uid != os.geteuid():
                return False
        finally:
            os.close(fd)
        if is_on_local_disk(path):
            with held(path) as fd:
                return fd >= 0
    return False


def _has_no_library(fd: int) -> bool:
    return os.pread(fd, len(_MAGIC), 0) != _MAGIC
