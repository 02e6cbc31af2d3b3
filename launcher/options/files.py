"""Reads files that somebody else has chosen, and files that hold one secret: a token, a password, a key."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from elaunch.launcher.errors import UsageError

# The folder in which elaunch keeps a user's secrets. Nodes that share the home share it.
FOLDER = "~/.elaunch"
TOKEN_LINE = "export ELAUNCH_TOKEN=$(openssl rand -hex 16)"


def read_secret(path: str) -> str:
    """The first line of `path`, without spaces around it. `~` means the user's home. Raises UsageError.

    All further lines must be comments, which begin with `#`.
    """
    try:
        secret, _, rest = Path(path).expanduser().read_text("utf-8").strip().partition("\n")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the secret in {path} cannot be read ({why}); give a file that you may read") from None
    if not secret:
        raise UsageError(f"{path} is empty and should hold a secret; write one into it, and let only yourself read it")
    others = [line for line in rest.splitlines() if line.strip() and not line.startswith("#")]
    if len(secret.split()) > 1 or others:
        raise UsageError(f"{path} should hold one secret and holds several words; name another file")
    return secret.strip()


def read_own(path: Path, bytes_max: int) -> bytes:
    """The first bytes of a file that only this user can read and write, and that is not a link. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} belongs to another user, or others can open it")
        return file.read(bytes_max)


def write_own(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, whole or not at all. One that is there stays. Raises OSError."""
    with suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=path.parent) as draft:
        draft.write(content)
        draft.flush()
        os.fsync(draft.fileno())
        os.link(draft.name, path)
