"""Removes what a killed builder leaves of a torch extension: the lock for which all later ranks wait without an end.

`torch.utils.cpp_extension` builds under a lock that is a file (torch/utils/file_baton.py): who makes it, builds, and
keeps it open; all others sleep until it is gone. Nothing in torch notices that the builder is dead.
The kernel knows whether anybody on this host has the file open, in whatever container: it grants a write lease only if
nobody has. On a disk that hosts share the builder may be on another host.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# A builder closes its lock just before it removes the file.
_LOOK_AGAIN_S = 0.05
# No build of another host is so old without a word.
_OLD_S = 600.0
# Disks that one host has for itself.
_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"))


def remove_dead(root: str, say: Callable[[str], None]) -> None:
    """Remove the locks of dead builders in this folder of extensions, and name each.

    One that may be held on another host is only named.
    """
    for lock in _locks(Path(root)):
        with suppress(OSError):
            if not _is_free(lock):
                continue
            time.sleep(_LOOK_AGAIN_S)
            if not _is_free(lock):
                continue
            age_s = time.time() - lock.stat().st_mtime
            if _disk_of(lock) in _LOCAL:
                lock.unlink()
                say(f"removed {lock}: who built this torch extension was killed, and ranks wait until the lock is gone")
            elif age_s >= _OLD_S:
                say(
                    f"{lock} is the lock of a torch extension's build, {age_s / 60:.0f} minutes old, and nobody on this"
                    " host has it open: if no other host builds it, ranks wait for it without an end; remove it"
                )


def _locks(root: Path) -> list[Path]:
    """Those in a folder for each extension, below one for each kind of torch where the user chose none."""
    return sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern))


def _is_free(lock: Path) -> bool:
    """Whether no process of this host has this user's file open. Raises OSError if it is gone or cannot be asked."""
    fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_uid != os.geteuid() or os.fstat(fd).st_size:
            return False
        # Whoever opens the file meanwhile has this process signalled; SIGIO would end it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
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
