"""Names the sockets that another process holds: their kind, their addresses, and who made the connection."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class HeldSocket:
    """One socket of a process. `inode` is its own, as in /proc/net/unix.

    `maker` is the pid of the process that made the pair, or that connected or listened at the other end: 0 if unknown.
    """

    fd: int
    inode: int
    kind: str
    here: str
    there: str
    maker: int

    def __str__(self) -> str:
        made = f" made by {self.maker}" if self.maker else ""
        ends = f" {self.here or '-'} to {self.there or '-'}" if self.here or self.there else ""
        return f"fd {self.fd} [{self.inode}]: {self.kind}{ends}{made}"


def sockets_of(pid: int) -> list[HeldSocket]:
    """All sockets of the process, by descriptor. One that is closed meanwhile is left out."""
    found: list[HeldSocket] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(path.readlink())
            if target.startswith("socket:["):
                with _copy(pid, int(path.name)) as copy:
                    found.append(_described(int(path.name), int(target[8:-1]), copy))
    return sorted(found, key=lambda each: each.fd)


@contextmanager
def _copy(pid: int, fd: int) -> Iterator[socket.socket]:
    """A descriptor of our own for that process's socket. Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        copy = _LIBC.syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid}")
    finally:
        os.close(pidfd)
    with socket.socket(fileno=copy) as held:
        yield held


def _described(fd: int, inode: int, held: socket.socket) -> HeldSocket:
    kind = f"{held.family.name} {held.type.name}".replace("AF_", "").replace("SOCK_", "").lower()
    maker = 0
    if held.family is socket.AF_UNIX:
        maker = _CREDENTIALS.unpack(held.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    there = ""
    with suppress(OSError):
        there = str(held.getpeername() or "")
    return HeldSocket(fd, inode, kind, str(held.getsockname() or ""), there, max(maker, 0))
