"""A key in the user's home, `~/.elaunch/key`: nodes that share the home make the same secret of a job's name with it.

It is made once and stays, so that no job can find what another has left.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_PLACE = Path("~/.elaunch/key")
_BYTES = 32


def token_at_home(name: str, *, make: bool = False) -> str:
    """The token of the job of that name; empty where this user has no key here. `make` is for who may make one."""
    try:
        path = _PLACE.expanduser()
        if make:
            _make(path)
        key = _read(path)
    except (OSError, RuntimeError):
        # RuntimeError: this user has no home.
        return ""
    return hmac.digest(key, name.encode(), "sha256").hex()[:32] if key else ""


def _make(path: Path) -> None:
    """Whole or not at all; the first of several wins, and nothing else stays."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as draft:
            draft.write(secrets.token_bytes(_BYTES))
            draft.flush()
            os.fsync(draft.fileno())
            os.link(draft.name, path)


def _read(path: Path) -> bytes:
    """The key, where it is this user's own and nobody else's to read or write; else nothing."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123
        found = os.fstat(fd)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        key = file.read(_BYTES + 1) if is_own else b""
    return key if len(key) == _BYTES else b""
