"""The tokens of the stores that this user's agents serve, in `~/.elaunch/stores`. Nodes that share the home find them.

The name of a token's file is the fingerprint of the token's certificate. A store shows it to every client. So a
client finds the file however the endpoint is spelled, and a file that was left behind cannot affect another store.
The file exists before the store answers any client, and is removed when the store ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elaunch.agent.guardian.guardian import boot_id
from elaunch.launcher.options.secret_file import FOLDER, open_own, private_folder, read_own
from elaunch.rendezvous.addresses import is_meant_locally
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.secret import Secret, fingerprint
from elaunch.rendezvous.texts import node_host

STORES = f"{FOLDER}/stores"

_NAME = re.compile(r"[0-9a-f]{32}")
_BYTES_MAX = 4096
# Another agent may remove the empty folder just as it is to be used.
_TRIES = 5


class KeptToken:
    """The file of one token. It is locked as long as this process lives."""

    def __init__(self, token: str, endpoint: Endpoint) -> None:
        """Raises OSError if this user has no home, or nothing can be written there."""
        text = (
            f"{token}\n# at {endpoint}\n# boot {_boot()}\n"
            f"# host {node_host(socket.gethostname())}\n# network {_network()}\n"
            f"# of an elaunch, process {os.getpid()}, which removes this at its end\n"
        )
        name = fingerprint(Secret(token).der)
        self.path = str(Path(STORES).expanduser() / name)
        self._fd = _write(name, text)

    def remove(self) -> None:
        # Close first: a shared disk keeps a removed file that is still open.
        os.close(self._fd)
        remove(self.path)


class KeptTokens:
    """The kept tokens of this user. Files that another user could have written are ignored."""

    def token_for(self, certificate: bytes) -> str:
        """The token that a certificate (DER) was made from, or empty."""
        with suppress(OSError), private_folder(STORES) as folder:
            return _lines(read_own(fingerprint(certificate), _BYTES_MAX, folder))[0]
        return ""

    def place_of(self, endpoint: Endpoint) -> str:
        """The file of a store that this user's elaunch serves at `endpoint`, or empty.

        A loopback address names a different endpoint on each host, and in each container.
        """
        here = {f"# at {endpoint}"}
        if is_meant_locally(endpoint.host):
            here |= {f"# boot {_boot()}", f"# network {_network()}"}
        with suppress(OSError), private_folder(STORES) as folder:
            for name in _names(folder):
                with suppress(OSError):
                    if here <= {*_lines(read_own(name, _BYTES_MAX, folder))}:
                        return f"{STORES}/{name}"
        return ""


@contextmanager
def token_removed_at_exit() -> Iterator[None]:
    """For the store's process: read a path from the first line on stdin, and remove that file at the end.

    The file is removed even if the agent is killed.
    """
    path = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        path += byte
    try:
        yield
    finally:
        if path:
            remove(os.fsdecode(path))


def remove(path: str) -> None:
    """Remove a token's file, and its folders if they are empty."""
    with suppress(OSError):
        Path(path).unlink()
    with suppress(OSError):
        Path(path).parent.rmdir()
        Path(path).parent.parent.rmdir()


def _write(name: str, text: str) -> int:
    """Write a new, locked file and return its descriptor. The file gets its name when it is whole. Raises OSError."""
    for tries_left in reversed(range(_TRIES)):
        try:
            with private_folder(STORES, make=True) as folder:
                _remove_abandoned(folder)
                return _write_in(folder, name, text)
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError


def _write_in(folder: int, name: str, text: str) -> int:
    draft = secrets.token_hex(16)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        # On a disk without locks, a file that is left behind is never removed.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, text.encode())
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise
    return fd


def _remove_abandoned(folder: int) -> None:
    """Remove the files of this host's agents that were killed together with their stores. Other hosts' files stay."""
    for name in _names(folder):
        with suppress(OSError):
            fd = open_own(name, folder)
            try:
                # Raises OSError if the file's agent lives.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_of_this_host(_lines(os.read(fd, _BYTES_MAX))):
                    os.unlink(name, dir_fd=folder)
            finally:
                os.close(fd)


def _is_of_this_host(lines: list[str]) -> bool:
    """Whether an agent on this host wrote the file, also in a container, or before the host was started again.

    On a disk that hosts share, a lock may be visible on one host only. So an agent of another host may live.
    """
    host = node_host(socket.gethostname())
    return f"# boot {_boot()}" in lines or (f"# host {host}" in lines and host.partition(".")[0] != "localhost")


def _names(folder: int) -> list[str]:
    return [name for name in os.listdir(folder) if _NAME.fullmatch(name)]


def _lines(text: bytes) -> list[str]:
    return text.decode(errors="replace").splitlines() or [""]


def _boot() -> str:
    return boot_id().decode().strip()


def _network() -> str:
    """The network namespace: processes in the same one share a loopback address."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/net")  # noqa: PTH115
    return ""
