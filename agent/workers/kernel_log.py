"""Reads what the kernel logs from now on: whom it killed for lack of memory, and the errors of the NVIDIA driver."""

from __future__ import annotations

import os
import re
import threading

_KILLED = re.compile(r"[Kk]illed process (\d+)")
_XID = "NVRM: Xid"
# Of a driver that repeats itself the first lines are enough.
_XIDS_MAX = 32
_KILLS_MAX = 1024


class KernelLog:
    """The kernel's messages since this object was made; none if this user may not read them. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kills: dict[int, str] = {}
        self._xids: list[str] = []
        try:
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    def kill_of(self, pid: int) -> str:
        """The message that the kernel killed that process for lack of memory, or the empty string."""
        with self._lock:
            self._read()
            return self._kills.get(pid, "")

    def xids(self) -> tuple[str, ...]:
        """The driver's errors, oldest first, as in "Xid (PCI:0000:3b:00): 79, …"."""
        with self._lock:
            self._read()
            return tuple(self._xids)

    def _read(self) -> None:
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192).decode(errors="replace")
            except BrokenPipeError:
                # The kernel overwrote records before they were read. The next read begins at the oldest one left.
                continue
            except OSError:
                return
            if (killed := _KILLED.search(record)) and len(self._kills) < _KILLS_MAX:
                self._kills[int(killed[1])] = record
            _, found, rest = record.partition(_XID)
            if found and len(self._xids) < _XIDS_MAX:
                self._xids.append("Xid" + rest.partition("\n")[0])
