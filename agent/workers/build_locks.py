"""Removes what a killed builder leaves of a torch extension: the lock for which all later ranks wait without an end.

`torch.utils.cpp_extension` builds under a lock that is a file (torch/utils/file_baton.py): who makes it, builds, and
keeps it open; all others sleep until it is gone. Nothing in torch notices that the builder is dead.
The kernel knows whether anybody on this host has the file open, in whatever container: it grants a write lease only if
nobody has. On a disk that hosts share the builder may be on another host, and NFS grants no lease at all.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A builder closes its lock just before it removes the file.
_LOOK_AGAIN_S = 0.05
# No build of another host is so old without a word.
_OLD_S = 600.0
# Disks that one host has for itself.
_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"))


def remove_dead(root: str, say: Callable[[str], None]) -> None:
    """Remove the locks of dead builders in this folder of extensions, and name each.

    One that may be held on another host is only named. The disk may hang, so this is not for the agent's loop.
    """
    free = []
    for lock in _locks(Path(root)):
        with suppress(OSError):
            status = lock.lstat()
            if status.st_uid != os.geteuid() or status.st_size or not stat.S_ISREG(status.st_mode):
                continue
            age_s = time.time() - status.st_mtime
            if _disk_of(lock) in _LOCAL:
                with _held(lock) as is_free:
                    free += [lock] if is_free else []
            elif age_s >= _OLD_S:
                say(
                    f"{lock} is the lock of a torch extension's build, and {age_s / 60:.0f} minutes old. If no host"
                    " builds that extension now, remove the lock: ranks wait for it without an end"
                )
    if free:
        time.sleep(_LOOK_AGAIN_S)
    for lock in free:
        with suppress(OSError), _held(lock) as is_free:
            if is_free:
                lock.unlink()
                say(f"removed {lock}: the builder of this torch extension was killed, and ranks wait for its lock")


def _locks(root: Path) -> list[Path]:
    """Those in a folder for each extension, below one for each kind of torch where the user chose none."""
    return sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern))


@contextmanager
def _held(lock: Path) -> Iterator[bool]:
    """Whether nobody else has this file open. If so, nobody can open it, remove it here or make it anew meanwhile."""
    fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        # Whoever opens the file meanwhile has this process signalled; SIGIO would end it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            yield False
        else:
            # Another agent may have removed this file just before, and the path may be a builder's new lock.
            yield os.fstat(fd).st_nlink > 0
    finally:
        os.close(fd)


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
