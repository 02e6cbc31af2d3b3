"""Keeps what was learned of a program's imports between jobs: one small file for each program, the user's own.

A file that is damaged, or that cannot be written, is no error: the next start learns it again.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from elaunch import user_cache
from elaunch.agent.forkserver.learned import Learned
from elaunch.digests import sha256
from elaunch.records import replace
from elaunch.rendezvous.codec import decode, encode

_BYTES_MAX = 4 << 20
_FILES_MAX = 200
# The installer's record of a package; its version is in the name.
_RECORDS = (".dist-info", ".egg-info")


def state_of_packages() -> str:
    """A word that is another one when packages have been installed, upgraded or removed."""
    places = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    seen: list[object] = [sys.version, sys.executable]
    for place in places:
        with suppress(OSError):
            # Not the folder's time: Python's own caches change that.
            seen.append(sorted(name for name in os.listdir(place) if name.endswith(_RECORDS)))  # noqa: PTH208
    return sha256(json.dumps(seen).encode()).hexdigest()


def read(file: Path | None) -> Learned:
    """What is remembered in `file` of the packages that are installed now; nothing if it cannot be read."""
    packages = state_of_packages() if file else ""
    with suppress(OSError, ValueError):
        status = file.stat() if file else None
        if file and status and status.st_uid == os.geteuid() and status.st_size <= _BYTES_MAX:
            learned = decode(Learned, file.read_text())
            if learned.packages == packages:
                return learned
    return Learned(packages=packages)


def write(file: Path, learned: Learned) -> None:
    """Remember it. If that cannot be, the next start learns it again."""
    # Imported here: most starts learn nothing new.
    import tempfile

    with suppress(OSError):
        if not user_cache.make(file.parent):
            return
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as draft:
            try:
                draft.write(encode(learned))
                draft.close()
                os.replace(draft.name, file)  # noqa: PTH105
            except BaseException:
                Path(draft.name).unlink()
                raise
        user_cache.remove_oldest(file.parent, _FILES_MAX)


def write_unused(file: Path, unused: tuple[str, ...], unused_in: str) -> None:
    """Remember these fields of `Learned`. Another job of the program may have written the others meanwhile."""
    write(file, replace(read(file), unused=unused, unused_in=unused_in))
