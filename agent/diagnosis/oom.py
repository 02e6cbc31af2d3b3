"""Whom the kernel killed for lack of memory, and the errors that the NVIDIA driver logged."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elaunch.rendezvous.format import bytes_text

_ANONYMOUS = re.compile(r"anon-rss:(\d+)kB")
_SHARED = re.compile(r"shmem-rss:(\d+)kB")
_KILLED = re.compile(r"[Kk]illed process (\d+)")
_XID = "NVRM: Xid"
# Of a driver that repeats itself the first lines are enough.
_XIDS_MAX = 32
_KILLS_MAX = 1024
# Of kills that the kernel counted at once, the exits come within this time.
_CLAIM_S = 5.0


class KernelLog:
    """The kernel's messages and its counts of kills since this object was made. For any thread.

    There are no messages if this user may not read them. `counters` are the event files of this process's memory cgroup
    (v2 `memory.events`, v1 `memory.oom_control`).
    """

    def __init__(self, counters: Sequence[Path]) -> None:
        self._counters = counters
        self._counted = self._kills_counted() or 0
        self._claim_until_s = 0.0
        self._lock = threading.Lock()
        self._kills: dict[int, str] = {}
        self._xids: list[str] = []
        try:
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    def oom_text(self, pid: int, now_s: float) -> str:
        """A short text if the kernel killed `pid` for lack of memory, or may have done so. Else the empty string."""
        with self._lock:
            self._read()
            before, self._counted = self._counted, self._kills_counted() or 0
            if self._counted > before:
                # Several processes may have been killed at once.
                self._claim_until_s = now_s + _CLAIM_S
        if record := self._kills.get(pid):
            held = sum(int(m[1]) << 10 for pattern in (_ANONYMOUS, _SHARED) for m in [pattern.search(record)] if m)
            return "out of memory, per the kernel log" + (f"; it held {bytes_text(held)}" if held else "")
        return "its memory cgroup counted an out-of-memory kill at that time" if now_s < self._claim_until_s else ""

    @property
    def counts_kills(self) -> bool:
        """Whether kills are counted, so that a count that has not grown proves that there was none."""
        return self._kills_counted() is not None

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

    def _kills_counted(self) -> int | None:
        """The sum of the counters; None where there is none."""
        found = [count for path in self._counters if (count := _count(path)) is not None]
        return sum(found) if found else None


_V1_NAMES = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
# A limit above this is none: v1 of cgroups writes the largest number of pages.
_NO_LIMIT = 1 << 60


def _count(path: Path) -> int | None:
    with suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE):
            return int(found[1])
    return None


def limit_text() -> str:
    """The limit of this process's memory cgroup, and how much of it was used at most. Empty without a limit."""
    for path in counter_files():
        names = ("memory.max", "memory.peak") if path.name == "memory.events" else _V1_NAMES
        limit, peak = (_number(path.with_name(name)) for name in names)
        if 0 < limit < _NO_LIMIT:
            return bytes_text(limit) + (f", of which {bytes_text(peak)} were used" if peak else "")
    return ""


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def counter_files() -> list[Path]:
    """The event counters of this process's own memory cgroups."""
    found: list[str] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                found.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return [path for path in map(Path, found) if path.exists()]
