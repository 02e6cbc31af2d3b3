"""The tokens of served stores, in files of this user's home.

A token that elaunch made is in a file of `~/.elaunch/stores`, for this user's other agents, while its store runs.
The nodes that a scheduler started derive the token of their job from its name and the key in `~/.elaunch/key`, which
all of them share.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elaunch.agent.guardian.guardian import boot_id
from elaunch.rendezvous.endpoint import Endpoint, is_meant_locally
from elaunch.rendezvous.secret import Secret, fingerprint

# The folder in which elaunch keeps a user's secrets. Nodes that share the home share it.
FOLDER = "~/.elaunch"
TOKEN_LINE = "export ELAUNCH_TOKEN=$(openssl rand -hex 16)"
STORES = f"{FOLDER}/stores"
_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_BYTES_MAX = 4096
_KEY_BYTES = 32


def store_token(token: str, endpoint: Endpoint) -> str:
    """Write the file of one token, and return its path. Its name is the fingerprint of the store's certificate.

    So a client finds the file however the endpoint is spelled, and a stale file cannot affect another
    store. The store's process removes it. Raises OSError if nothing can be written there, RuntimeError without a home.
    """
    path = Path(STORES).expanduser() / fingerprint(Secret(token).der)
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    text = f"{token}\n# at {endpoint}\n# {_here()}\n# of elaunch's process {os.getpid()}, whose store removes it\n"
    write_own(path, text.encode())
    return str(path)


class StoredTokens:
    """The tokens that this user's agents find. Files that another user could have written are ignored.

    `derived` is the job's token from the key in the home, empty if there is none.
    """

    def __init__(self, derived: str = "") -> None:
        self._derived = derived

    def token_for(self, certificate: bytes) -> str:
        """The token that a certificate (DER) was made from, or empty."""
        name = fingerprint(certificate)
        if self._derived and fingerprint(Secret(self._derived).der) == name:
            return self._derived
        with suppress(OSError, RuntimeError):
            return _lines(Path(STORES).expanduser() / name)[0]
        return ""

    def path_of(self, endpoint: Endpoint) -> str:
        """The file of a store that this user's elaunch serves at `endpoint`, or empty.

        A loopback address names a different endpoint on each host, and in each container.
        """
        wanted = {f"# at {endpoint}", *([f"# {_here()}"] if is_meant_locally(endpoint.host) else [])}
        with suppress(OSError, RuntimeError):
            for path in Path(STORES).expanduser().iterdir():
                with suppress(OSError):
                    if _NAME.fullmatch(path.name) and wanted <= {*_lines(path)}:
                        return f"{STORES}/{path.name}"
        return ""


@contextmanager
def token_removed_at_exit() -> Iterator[None]:
    """For the store's process: read a path from the first line on stdin, and remove that file at the end.

    The file is removed even if the agent is killed.
    """
    path = b""
    # Byte by byte: the server reads the next line.
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        path += byte
    try:
        yield
    finally:
        if path:
            with suppress(OSError):
                Path(os.fsdecode(path)).unlink()


def _lines(path: Path) -> list[str]:
    return read_own(path, _FILE_BYTES_MAX).decode(errors="replace").splitlines() or [""]


def _here() -> str:
    """This host's boot and network namespace: processes in the same one share a loopback address."""
    return f"boot {boot_id().decode().strip()}, network {Path('/proc/self/ns/net').readlink()}"


def derived_token(name: str) -> str:
    """The token for the job `name`, derived from this user's key (made if missing); empty without a usable key.

    The key stays. No job leaves a token of its own in the home, which another job could find.
    """
    try:
        path = Path(FOLDER, "key").expanduser()
        if not path.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # If several agents make it, the first one's stays.
            write_own(path, secrets.token_bytes(_KEY_BYTES))
        key = read_own(path, _KEY_BYTES + 1)
    except (OSError, RuntimeError):
        # RuntimeError: this user has no home.
        return ""
    return hmac.digest(key, name.encode(), "sha256").hex()[:32] if len(key) == _KEY_BYTES else ""


def read_own(path: Path, bytes_max: int) -> bytes:
    """The first bytes of a file that only this user can read and write, and that is not a link. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} belongs to another user, or others can open it")
        return file.read(bytes_max)


def write_own(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, whole or not at all. An existing file stays. Raises OSError."""
    with suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=path.parent) as draft:
        draft.write(content)
        draft.flush()
        os.fsync(draft.fileno())
        os.link(draft.name, path)
