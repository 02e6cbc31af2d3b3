"""gloo's threads in a worker, which move bytes between ranks, and the connections that they wait for.

A fresh worker imports this before its program, so it imports as little as it can.
"""

from __future__ import annotations

import os
import sys

# `typing` itself is not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Set
    from typing import Any

_TASKS = "/proc/self/task"
# epoll_wait and epoll_pwait on x86-64 and ARM, and how gloo calls it: for 64 events, or 10 ms (transport/tcp/loop.cc).
_EPOLL_WAITS = (b"232", b"281", b"22")
_AS_GLOO = [b"0x40", b"0xa"]
# Of <sys/socket.h> and <sys/epoll.h>.
_SHUT_WR, _SHUT_RDWR = 1, 2
_EPOLL_CTL_MOD, _EPOLLIN, _EPOLLONESHOT = 3, 1, 1 << 30


class GlooThreads:
    """The threads that move bytes for gloo. A thread whose peer is gone loops without end.

    It can no longer be recognised then, so it has to be found while it still waits as gloo does.
    """

    def __init__(self) -> None:
        # The epoll of each thread, which lives as long as the thread.
        self._epolls: dict[int, int] = {}
        self._count = 0

    @property
    def tids(self) -> Set[int]:
        """Their ids, as of the last look."""
        return self._epolls.keys()

    def look(self) -> None:
        """Look for new ones if the number of threads has changed, or if none was found yet."""
        names = os.listdir(_TASKS)  # noqa: PTH208
        if len(names) == self._count and self._epolls:
            return
        self._count = len(names)
        found = {int(name): self._epolls.get(int(name)) or _epoll_of(name) for name in names}
        self._epolls = {tid: epoll for tid, epoll in found.items() if epoll}

    def half_close(self, ctypes: Any) -> None:
        """Tell all peers that nothing more comes from here, before this process ends: who waits for it gets an error.

        gloo is told nothing, and takes its connections apart as ever. It hears once more of each connection. A thread
        that waits for a peer that is gone would otherwise loop, and take half a CPU from the end of this process.
        """
        for epoll, fd, data in self._close(_SHUT_WR):
            _hear_once(ctypes, epoll, fd, data)

    def break_off(self) -> None:
        """Have what waits for peers get an error. Does nothing where there are several threads."""
        if len(self._epolls) == 1:
            self._close(_SHUT_RDWR)

    def _close(self, how: int) -> list[tuple[int, int, int]]:
        """Shut gloo's connections down. Returns the epoll, the descriptor and gloo's own name of each."""
        socket: Any = sys.modules.get("_socket")
        names = os.listdir(_TASKS) if socket and self._epolls else []  # noqa: PTH208
        # After the end of a thread the number of its epoll may be another file's.
        epolls = {epoll for tid, epoll in self._epolls.items() if str(tid) in names}
        closed = []
        for each in [(epoll, *watched) for epoll in epolls for watched in _watched(epoll)]:
            try:
                connection = socket.socket(fileno=os.dup(each[1]))
            except OSError:
                # By this file gloo wakes the thread, or it is gone.
                continue
            try:
                # gloo ends the process if its listener is shut down.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    closed.append(each)
                    connection.shutdown(how)
            except OSError:
                # Its peer has closed it.
                continue
            finally:
                connection.close()
        return closed


def _hear_once(ctypes: Any, epoll: int, fd: int, data: int) -> None:
    """Have the thread hear once more of that descriptor. `data` is what gloo knows it by."""

    class Event(ctypes.Structure):  # type: ignore[misc]
        _pack_ = 1 if os.uname().machine == "x86_64" else 8
        _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))

    ctypes.CDLL(None).epoll_ctl(epoll, _EPOLL_CTL_MOD, fd, ctypes.byref(Event(_EPOLLIN | _EPOLLONESHOT, data)))


def _epoll_of(tid: str) -> int:
    """The epoll for which that thread waits as gloo does; 0 if it does not."""
    words = _read(f"{_TASKS}/{tid}/syscall").split()
    return int(words[1], 16) if words[3:5] == _AS_GLOO and words[0] in _EPOLL_WAITS else 0


def _watched(epoll: int) -> Iterator[tuple[int, int]]:
    """The descriptors in that epoll, and what its user knows each by."""
    for line in _read(f"/proc/self/fdinfo/{epoll}").splitlines():
        if line.startswith(b"tfd:"):
            words = line.split()
            yield int(words[1]), int(words[5], 16)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", 0) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""
