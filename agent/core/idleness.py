"""How long processes that a successful job's workers have left behind may go on: as long as they do something.

Pure: the caller reads what they have used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A process works if it uses this share of a core, or moves this many bytes a second. An upload that reads its file
# does; a monitor that looks now and then (tensorboard, `nvidia-smi -l`) does not.
_CPU_SHARE = 0.05
_BYTES_PER_S = 10_000
# Uses are compared over this long, so that a short wait for a server is not idleness.
_WINDOW_S = 5.0
# A process that always works would keep the job's nodes for ever: all end after so many times the grace.
_GRACES_MAX = 60


@dataclass(frozen=True)
class Use:
    """What a process has used since its start, its ended children included."""

    cpu_s: float = 0.0
    io_bytes: int = 0


class Idleness:
    """Judges processes by their use, by pid. They begin as working at `now_s`. `due_s` is when to call `is_over`."""

    def __init__(self, grace_s: float, now_s: float, uses: Mapping[int, Use]) -> None:
        self._grace_s = grace_s
        self._window_s = min(_WINDOW_S, grace_s / 2)
        self._uses, self._looked_s, self._worked_s = dict(uses), now_s, now_s
        self._end_s = now_s + grace_s * _GRACES_MAX

    @property
    def due_s(self) -> float:
        return self._looked_s + self._window_s

    def is_over(self, now_s: float, uses: Mapping[int, Use]) -> bool:
        """Whether none has worked for the whole grace, or their time is over."""
        since_s = now_s - self._looked_s
        if any(_works(use, self._uses.get(pid, Use()), since_s) for pid, use in uses.items()):
            self._worked_s = now_s
        self._uses, self._looked_s = dict(uses), now_s
        return now_s >= min(self._worked_s + self._grace_s, self._end_s)


def _works(use: Use, before: Use, since_s: float) -> bool:
    is_moving = use.io_bytes - before.io_bytes >= _BYTES_PER_S * since_s
    return is_moving or use.cpu_s - before.cpu_s >= _CPU_SHARE * since_s
