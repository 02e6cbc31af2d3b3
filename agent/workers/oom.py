"""Finds out whether the kernel killed a process for lack of memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_KILLED = re.compile(r"[Kk]illed process (\d+)")


class OutOfMemoryWatch:
    """Finds out whether a SIGKILL came from the kernel's out-of-memory killer.

    Reads the kernel log, if that is allowed, and the counters of this process's memory cgroup (v2 `memory.events`, v1
    `memory.oom_control`). Kills from before this object was made do not count.
    """

    def __init__(self) -> None:
        self._counters = _counter_files()
        self._before = self._kills()
        self._log = _open_log()

    def word_on(self, pid: int) -> str:
        """A few words if the kernel killed `pid` for lack of memory, or may have done so. Else the empty string."""
        if any(int(m[1]) == pid for record in self._records() for m in [_KILLED.search(record)] if m):
            return "out of memory, says the kernel log"
        before, self._before = self._before, self._kills()
        if self._before > before:
            return "its memory cgroup counted an out-of-memory kill at that time"
        return ""

    def _kills(self) -> int:
        total = 0
        for path in self._counters:
            with suppress(OSError):
                if found := re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE):
                    total += int(found[1])
        return total

    def _records(self) -> list[str]:
        records: list[str] = []
        if self._log is None:
            return records
        while True:
            try:
                records.append(os.read(self._log, 8192).decode(errors="replace"))
            except BrokenPipeError:
                # The kernel overwrote records before they were read. The next read begins at the oldest one left.
                continue
            except OSError:
                return records


def _open_log() -> int | None:
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return None
    return fd


def _counter_files() -> list[Path]:
    """The event counters of this process's own memory cgroups."""
    mounts: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            left, _, right = line.partition(" - ")
            kind, _, options = right.split()[0], *right.split()[1:3]
            if kind == "cgroup2":
                mounts[""] = left.split()[4]
            elif kind == "cgroup" and "memory" in options.split(","):
                mounts["memory"] = left.split()[4]
        for line in Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" and "" in mounts:
                mounts[""] += path
            elif "memory" in controllers.split(",") and "memory" in mounts:
                mounts["memory"] += path
    names = {"": "memory.events", "memory": "memory.oom_control"}
    return [p for key, root in mounts.items() if (p := Path(root) / names[key]).exists()]
