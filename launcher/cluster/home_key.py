"""The key `~/.elaunch/key` in the user's home. Nodes that share the home derive a job's token from it and the name.

The key is made once and stays. No job leaves a token of its own in the home, which another job could find.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from elaunch.launcher.options.secret_file import FOLDER, read_own

_BYTES = 32
# Another agent may remove the empty folder just as it is to be used.
_TRIES = 5


def token_at_home(name: str, *, make: bool = False) -> str:
    """The token of the job of that name, or empty if this user has no key here. With `make`, make a missing key."""
    try:
        path = Path(FOLDER, "key").expanduser()
        if make:
            _make(path)
        key = read_own(path, _BYTES + 1)
    except (OSError, RuntimeError):
        # RuntimeError: this user has no home.
        return ""
    return hmac.digest(key, name.encode(), "sha256").hex()[:32] if len(key) == _BYTES else ""


def _make(path: Path) -> None:
    """Make the key file whole or not at all. If several agents make it, the first one's stays."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            with suppress(OSError):
                path.parent.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=path.parent) as draft:
                draft.write(secrets.token_bytes(_BYTES))
                draft.flush()
                os.fsync(draft.fileno())
                os.link(draft.name, path)
            return
