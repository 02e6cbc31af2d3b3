"""Removes what a killed builder leaves of a torch extension: the lock for which all later ranks wait without an end.

`torch.utils.cpp_extension` builds under a lock that is a file (torch/utils/file_baton.py): who makes it, builds, and
keeps it open; all others sleep until it is gone. Nothing in torch notices that the builder is dead.
The kernel knows whether anybody on this host has the file open (`held_files`).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from elaunch.agent.workers.held_files import held, is_on_local_disk

# No build of another host is so old without a word.
_OLD_S = 600.0


def free_locks(root: str, say: Callable[[str], None]) -> list[Path]:
    """The locks in this folder of extensions that nobody holds at this moment.

    One that may be held on another host is only named. The disk may hang, so this is not for the agent's loop.
    """
    free: list[Path] = []
    for lock in _locks(Path(root)):
        with suppress(OSError):
            status = lock.lstat()
            if status.st_uid != os.geteuid() or status.st_size or not stat.S_ISREG(status.st_mode):
                continue
            age_s = time.time() - status.st_mtime
            if is_on_local_disk(lock):
                with held(lock) as fd:
                    free += [lock] if fd >= 0 else []
            elif age_s >= _OLD_S:
                say(
                    f"{lock} is the lock of a torch extension's build, and {age_s / 60:.0f} minutes old. If no host"
                    " builds that extension now, remove the lock: ranks wait for it without an end"
                )
    return free


def remove_free(locks: Iterable[Path], say: Callable[[str], None]) -> None:
    """Remove these locks if their builders are dead, and name each. A builder that lives may have just closed one."""
    for lock in locks:
        with suppress(OSError), held(lock) as fd:
            if fd >= 0:
                lock.unlink()
                say(f"removed {lock}: the builder of this torch extension was killed, and ranks wait for its lock")


def _locks(root: Path) -> list[Path]:
    """Those in a folder for each extension, below one for each kind of torch where the user chose none."""
    return sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern))
