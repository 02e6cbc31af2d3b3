"""Names the locks of torch extensions' builds that are there when workers start: ranks wait for them without a limit.

`torch.utils.cpp_extension` builds under a lock that is a file (torch/utils/file_baton.py): who makes it, builds; all
others sleep until it is gone. Nothing in torch notices that the builder was killed.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from elaunch.agent.environment import extensions_root


def warn_of_locks(environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Name the locks in the folder of extensions that workers with these variables use.

    In a thread, since the folder may be on a disk that hangs.
    """
    if root := extensions_root(environ):
        threading.Thread(target=_look, args=(Path(root), warn), name="elaunch-builds", daemon=True).start()


def _look(root: Path, warn: Callable[[str], None]) -> None:
    with suppress(OSError):
        # An extension's folder may be below one for each kind of torch.
        for lock in sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)):
            status = lock.lstat()
            if status.st_uid == os.geteuid() and not status.st_size and stat.S_ISREG(status.st_mode):
                warn(
                    f"{lock} is the lock of a torch extension's build, {max(0, time.time() - status.st_mtime):.0f} s "
                    f"old: ranks that load the extension wait until it is gone. If nothing builds it now, the builder "
                    f"was killed: rm {lock}"
                )
