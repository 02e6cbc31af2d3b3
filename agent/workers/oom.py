"""Finds out whether the kernel killed a process for lack of memory, and who held how much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elaunch.agent.core.sizes import bytes_text
from elaunch.agent.workers.kernel_log import KernelLog

_ANONYMOUS = re.compile(r"anon-rss:(\d+)kB")
_SHARED = re.compile(r"shmem-rss:(\d+)kB")
_V1_NAMES = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
# A limit above this is none: v1 of cgroups writes the largest number of pages.
_NO_LIMIT = 1 << 60
# The most ranks whose memory is named: the largest ones.
_NAMED_MAX = 4


class OutOfMemoryWatch:
    """Finds out whether a SIGKILL came from the kernel's out-of-memory killer.

    Asks the kernel log, if it can be read, and the counters of this process's memory cgroup (v2 `memory.events`, v1
    `memory.oom_control`). Kills from before this object was made do not count.
    """

    def __init__(self, log: KernelLog) -> None:
        self._counters = _counter_files()
        self._before = self._kills()
        self._log = log

    def word_on(self, pid: int) -> str:
        """A few words if the kernel killed `pid` for lack of memory, or may have done so. Else the empty string."""
        if record := self._log.kill_of(pid):
            held = sum(int(m[1]) << 10 for pattern in (_ANONYMOUS, _SHARED) for m in [pattern.search(record)] if m)
            self._before = self._kills()
            return "out of memory, says the kernel log" + (f"; it held {bytes_text(held)}" if held else "")
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


def limit_text() -> str:
    """The limit of this process's memory cgroup, and how much of it was used at most. Empty without a limit."""
    for path in _counter_files():
        names = ("memory.max", "memory.peak") if path.name == "memory.events" else _V1_NAMES
        limit, peak = (_number(path.with_name(name)) for name in names)
        if 0 < limit < _NO_LIMIT:
            return bytes_text(limit) + (f", of which {bytes_text(peak)} were used" if peak else "")
    return ""


def held_text(pids: Mapping[int, int]) -> str:
    """How much memory the workers that live hold now, with their child processes; `pids` is by rank.

    Empty where psutil is missing, or none of them lives.
    """
    try:
        import psutil
    except ImportError:
        return ""
    held: dict[int, int] = {}
    ranks = {pid: rank for rank, pid in pids.items()}
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for process in psutil.process_iter(["ppid", "memory_info"]):
        info = process.info["memory_info"]
        if info is not None:
            parents[process.pid], sizes[process.pid] = process.info["ppid"], info.rss
    for pid, size in sizes.items():
        above = pid
        while above and above not in ranks:
            above = parents.get(above, 0)
        if above:
            held[ranks[above]] = held.get(ranks[above], 0) + size
    largest = sorted(held.items(), key=lambda item: -item[1])[:_NAMED_MAX]
    return ", ".join(f"rank {rank} held {bytes_text(size)}" for rank, size in largest)


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


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
