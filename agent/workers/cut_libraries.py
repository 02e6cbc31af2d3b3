"""Removes what a killed compiler leaves in torch's caches: a library without content, on which all later runs fail.

The linker makes `….so` when it begins, and writes it at its end. torch takes a library that is there for one that is
whole: "file too short". No builder will complete a file that is empty or no library, and that nobody has open.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from elaunch.agent.workers.held_files import held, is_on_local_disk

_MAGIC = b"\x7fELF"
# A file that is made so soon after a look may leave its folder with the same time.
_SETTLED_NS = 2 * 10**9


class CutLibraries:
    """Looks, again and again, for such libraries in one cache of torch's. They lie at most `depth` folders deep.

    A folder in which no file was made or removed since it was looked at is left out, if all libraries in it were whole.
    """

    def __init__(self, root: str, depth: int) -> None:
        self._root = root
        self._depth = depth
        # When the folders whose libraries are whole were changed last.
        self._whole: dict[str, int] = {}

    def find(self) -> list[Path]:
        """The libraries that no builder will complete, as it seems at this moment.

        They are this user's files on a disk of this host alone. The disk may hang, so this is not for the agent's loop.
        """
        return [path for path in self._without_content(self._root, self._depth) if _is_given_up(path)]

    def _without_content(self, folder: str, depth: int) -> Iterator[Path]:
        """Libraries of this user, in folders of this user: another user's folder may lead anywhere."""
        with suppress(OSError):
            status = os.lstat(folder)
            is_whole = self._whole.get(folder) == status.st_mtime_ns
            if status.st_uid != os.geteuid() or (is_whole and not depth):
                return
            is_settled = time.time_ns() - status.st_mtime_ns > _SETTLED_NS
            cut: list[Path] = []
            for entry in os.scandir(folder):
                if entry.name.endswith(".so") and entry.is_file(follow_symlinks=False):
                    if not is_whole and not _is_library(entry.path):
                        cut.append(Path(entry.path))
                elif depth and entry.is_dir(follow_symlinks=False):
                    yield from self._without_content(entry.path, depth - 1)
            if is_settled and not cut:
                self._whole[folder] = status.st_mtime_ns
            yield from cut


def remove_cut(libraries: Iterable[Path], say: Callable[[str], None]) -> None:
    """Remove these libraries if they still have no content, and name each. A linker may have just closed one."""
    for path in libraries:
        with suppress(OSError), held(path) as fd:
            if fd >= 0 and not _begins_as_library(fd):
                path.unlink()
                say(f"removed {path}: a compiler that was killed had left it without content, and torch cannot load it")


def _is_given_up(path: Path) -> bool:
    with suppress(OSError):
        if path.lstat().st_uid == os.geteuid() and is_on_local_disk(path):
            with held(path) as fd:
                return fd >= 0
    return False


def _is_library(path: str) -> bool:
    """Whether it has content. One that cannot be read is none of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        return _begins_as_library(fd)
    finally:
        os.close(fd)


def _begins_as_library(fd: int) -> bool:
    return os.pread(fd, len(_MAGIC), 0) == _MAGIC
