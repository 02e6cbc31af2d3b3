"""Samples the workers' processes from outside, in /proc: CPU time, time on a run queue, page faults, I/O."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elaunch.agent import linux
from elaunch.agent.diagnosis.hang import SAMPLE_EVERY_S, Window

_TICKS = os.sysconf("SC_CLK_TCK")
_NS = 1e9


class _Counts(NamedTuple):
    """A process's counters at one sample, in the order of `Window`'s; by `identity` it differs from all others."""

    identity: tuple[int, int]
    state: str
    sums: tuple[float, ...]


class ProcSampler:
    """The processes of one generation's workers, by local rank. `sample` is due every `every_s`."""

    def __init__(self, every_s: float = SAMPLE_EVERY_S) -> None:
        self.every_s = every_s
        self._known: Mapping[int, _Counts] = {}
        self._sampled_s: float | None = None

    @property
    def due_s(self) -> float | None:
        """when the next sample is due, on the monotonic clock. None before the first."""
        return None if self._sampled_s is None else self._sampled_s + self.every_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for the next sample."""
        return self._sampled_s is None or now_s >= self._sampled_s + self.every_s

    def sample(self, pids: Mapping[int, int], now_s: float) -> dict[int, Window]:
        """What each worker did since the last sample. None for one that is gone, or at its first sample."""
        seconds = now_s - (now_s if self._sampled_s is None else self._sampled_s)
        found = {rank: counts for rank, pid in pids.items() if pid > 0 and (counts := _counts(pid))}
        before, self._known, self._sampled_s = self._known, found, now_s
        return {
            rank: _window(before[rank], now, seconds)
            for rank, now in found.items()
            if seconds > 0 and rank in before and before[rank].identity == now.identity
        }


def _window(before: _Counts, now: _Counts, seconds: float) -> Window:
    # A child that ended unseen took its time with it.
    gained = (abs(new - old) for old, new in zip(before.sums, now.sums, strict=True))
    cpu_s, main_s, delay_s, faults, io_bytes, switches, children_s = gained
    return Window(seconds, cpu_s, main_s, delay_s, faults, now.state, io_bytes, switches, children_s)


def _counts(pid: int) -> _Counts | None:
    """None where the process is gone."""
    try:
        fields = linux.stat_fields(pid)
        cpu_s, reaped_s = ((int(fields[i]) + int(fields[i + 1])) / _TICKS for i in (11, 13))
        main_s, delay_s = cpu_s, 0.0
        # Not every kernel has it.
        with suppress(FileNotFoundError):
            main_ns, delay_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
            main_s, delay_s = int(main_ns) / _NS, int(delay_ns) / _NS
        faults = int(fields[7]) + int(fields[9])
        children_s = sum(map(_cpu_s, linux.descendants(pid))) + reaped_s
        sums = cpu_s, main_s, delay_s, faults, _io_bytes(pid), _switches(pid), children_s
        return _Counts((pid, int(fields[19])), fields[0].decode(), sums)
    except (OSError, ValueError, IndexError):
        return None


def _io_bytes(pid: int) -> int:
    """Bytes read and written; 0 where this user may not know."""
    with suppress(PermissionError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def _switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("voluntary")), 0)


def _cpu_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return sum(int(ticks) for ticks in linux.stat_fields(pid)[11:15]) / _TICKS
    return 0.0
