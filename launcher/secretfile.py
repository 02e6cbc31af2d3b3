"""Files that hold one secret: a token or a password."""

from __future__ import annotations

from pathlib import Path

from elaunch.launcher.errors import UsageError
from elaunch.launcher.smallfile import read_small


def read_secret(path: str) -> str:
    """The secret in `path`, without the space around it; `~` is the user's folder. Raises UsageError."""
    try:
        secret = read_small(str(Path(path).expanduser()), may_be_pipe=True).strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise UsageError(f"the secret in {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not secret:
        raise UsageError(f"{path} is empty and should hold a secret; write one into it, readable by you alone")
    if len(secret.split()) > 1:
        raise UsageError(f"{path} should hold one secret and holds several words; name another file")
    return secret
