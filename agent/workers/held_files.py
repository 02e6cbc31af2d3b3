"""Whether any process of this host has a file open: the kernel grants a write lease only if nobody has.

That counts processes in whatever container. On a disk that hosts share another host may have the file open, and NFS
grants no lease at all.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Disks that one host has for itself.
_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"))


@contextmanager
def held(path: Path) -> Iterator[int]:
    """The open file if nobody else has it open, else -1.

    Nobody can open it meanwhile. Another file may still be renamed over it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        # Whoever opens the file meanwhile has this process signalled; SIGIO would end it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            yield -1
        else:
            # Another agent may have removed this file just before, and the path may be a builder's new one.
            yield fd if os.fstat(fd).st_nlink > 0 else -1
    finally:
        os.close(fd)


def is_on_local_disk(path: Path) -> bool:
    """Whether no other host can have the file open, as far as the kind of its file system tells."""
    return _disk_of(path) in _LOCAL


def _disk_of(path: Path) -> str:
    """The kind of file system that has the file; empty if that is not known."""
    real, found = os.path.realpath(path), ("", "")
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        # A blank in a name is written in octal.
        mount = left.split()[4].replace("\\040", " ")
        if (real == mount or real.startswith(f"{mount.rstrip('/')}/")) and len(mount) >= len(found[0]):
            found = (mount, right.split()[0])
    return found[1]
