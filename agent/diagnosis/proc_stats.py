"""Looks at the workers' processes from outside, in /proc: CPU time, time on a run queue, page faults, I/O.

A look costs two reads for each worker. What tells a standstill from slow work is read only where there may be one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from elaunch.agent import linux
from elaunch.agent.diagnosis.hang import LOOK_EVERY_S, Window, may_stand_still

_TICKS = os.sysconf("SC_CLK_TCK")
_NS = 1e9
_FILE_BYTES_MAX = 4096


@dataclass(frozen=True)
class _Counts:
    """A process's counters at one look; CPU times are in seconds since its start."""

    state: str
    cpu_s: float
    main_cpu_s: float
    main_delay_s: float
    faults: int
    reaped_cpu_s: float


@dataclass(frozen=True)
class _More:
    io_bytes: int
    switches: int
    children_cpu_s: float


class _Watched:
    """A worker's process: open files of /proc stay with this process, even if its pid is given to another one."""

    def __init__(self, pid: int, stat: int, schedstat: int) -> None:
        self.pid = pid
        self.stat = stat
        self.schedstat = schedstat
        self.counts: _Counts | None = None
        self.more: _More | None = None

    def close(self) -> None:
        for fd in (self.stat, self.schedstat):
            if fd >= 0:
                os.close(fd)


class Vitals:
    """The processes of one generation's workers, by local rank. `look` is due every `every_s`."""

    def __init__(self, every_s: float = LOOK_EVERY_S) -> None:
        self.every_s = every_s
        self._watched: dict[int, _Watched] = {}
        self._looked_s: float | None = None

    @property
    def due_s(self) -> float | None:
        """When the next look is due, on the monotonic clock. None before the first."""
        return None if self._looked_s is None else self._looked_s + self.every_s

    def forget(self) -> None:
        """Forget the processes of the last generation."""
        for watched in self._watched.values():
            watched.close()
        self._watched.clear()
        self._looked_s = None

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for the next look."""
        return self._looked_s is None or now_s >= self._looked_s + self.every_s

    def look(self, pids: Mapping[int, int], now_s: float) -> dict[int, Window]:
        """What each worker did since the last look. One that is gone has no window, nor has one at its first look."""
        seconds = now_s - (now_s if self._looked_s is None else self._looked_s)
        self._looked_s = now_s
        windows = {}
        for rank, pid in pids.items():
            if pid <= 0:
                continue
            watched = self._watched.get(rank)
            if watched is None or watched.pid != pid:
                watched = self._watched[rank] = _open(pid)
            if (window := _window(watched, seconds)) is not None:
                windows[rank] = window
        return windows


def _open(pid: int) -> _Watched:
    fds = []
    for name in ("stat", "schedstat"):
        try:
            fds.append(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            # Gone already; or a kernel without schedstat.
            fds.append(-1)
    stat, schedstat = fds
    return _Watched(pid, stat, schedstat)


def _window(watched: _Watched, seconds: float) -> Window | None:
    before, watched.counts = watched.counts, _counts(watched)
    now = watched.counts
    if before is None or now is None or seconds <= 0:
        watched.more = None
        return None
    window = Window(
        seconds,
        now.cpu_s - before.cpu_s,
        now.main_cpu_s - before.main_cpu_s,
        now.main_delay_s - before.main_delay_s,
        now.faults - before.faults,
        now.state,
    )
    known, watched.more = watched.more, None
    if not may_stand_still(window):
        return window
    watched.more = more = _more(watched.pid, now)
    if known is None:
        return window
    return replace(
        window,
        is_whole=True,
        io_bytes=more.io_bytes - known.io_bytes,
        switches=more.switches - known.switches,
        # A child that ended unseen took its time with it.
        children_cpu_s=abs(more.children_cpu_s - known.children_cpu_s),
    )


def _counts(watched: _Watched) -> _Counts | None:
    """None where the process is gone: a read of its open file fails then."""
    try:
        fields = os.pread(watched.stat, _FILE_BYTES_MAX, 0).rpartition(b")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
        reaped_s = (int(fields[13]) + int(fields[14])) / _TICKS
        main_s, delay_s = cpu_s, 0.0
        if watched.schedstat >= 0:
            words = os.pread(watched.schedstat, _FILE_BYTES_MAX, 0).split()
            main_s, delay_s = int(words[0]) / _NS, int(words[1]) / _NS
        return _Counts(fields[0].decode(), cpu_s, main_s, delay_s, int(fields[7]) + int(fields[9]), reaped_s)
    except (OSError, ValueError, IndexError):
        return None


def _more(pid: int, now: _Counts) -> _More:
    io = _numbers(f"/proc/{pid}/io", (b"rchar", b"wchar"))
    # Only of one that spins it matters how often it sleeps.
    switches = _numbers(f"/proc/{pid}/status", (b"voluntary_ctxt_switches",)) if now.state == "R" else []
    children_s = sum(_cpu_s(child) for child in linux.descendants(pid))
    return _More(sum(io), sum(switches), children_s + now.reaped_cpu_s)


def _numbers(path: str, names: Iterable[bytes]) -> list[int]:
    """The numbers of these lines; none where the file cannot be read."""
    try:
        with open(path, "rb", 0) as file:  # noqa: PTH123
            lines = [line.partition(b":") for line in file.read(_FILE_BYTES_MAX).splitlines()]
        return [int(value) for name, _, value in lines if name in names]
    except (OSError, ValueError):
        return []


def _cpu_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return sum(int(ticks) for ticks in linux.stat_fields(pid)[11:15]) / _TICKS
    return 0.0
