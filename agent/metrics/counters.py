"""Counts what the timeline tells: failures, hangs, repeated steps, and where the time went."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class TimeUse(Enum):
    """What a second of this node's life was used for."""

    PRODUCTIVE = "productive"
    STARTING = "starting"
    STOPPING = "stopping"
    WAITING = "waiting"


@dataclass(frozen=True)
class Counts:
    """The counters at one moment. `last_failure` is its wall clock (s) and kind, None without one."""

    seconds: Mapping[TimeUse, float]
    failures: Mapping[str, int]
    hangs: int
    steps_repeated: int
    last_failure: tuple[float, str] | None


class RunCounters:
    """Counts events of one agent's timeline; any thread may count and read. `now_s` is of the monotonic clock.

    Time is productive while workers run. Once a program has reported a step, the time before the first step of each
    later generation is that of a start.
    """

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        self._use, self._since_s = TimeUse.WAITING, now_s
        self._seconds = dict.fromkeys(TimeUse, 0.0)
        self._failures: Counter[str] = Counter()
        self._hangs = 0
        self._steps_repeated = 0
        self._last_failure: tuple[float, str] | None = None
        self._newest_step = -1

    def count(self, event: str, fields: Mapping[str, Any], now_s: float) -> None:
        """An event with its own fields, as on the timeline."""
        with self._lock:
            match event:
                case "sealed":
                    self._turn(TimeUse.STARTING, now_s)
                case "forked" if self._newest_step < 0:
                    self._turn(TimeUse.PRODUCTIVE, now_s)
                case "progress":
                    self._progress(fields, now_s)
                case "failed" | "stopping" | "killing" | "stopped":
                    self._turn(TimeUse.STOPPING, now_s)
                case "cleared":
                    self._turn(TimeUse.WAITING, now_s)
                case "cause":
                    kind = str(fields["kind"])
                    self._failures[kind] += 1
                    self._last_failure = (float(fields["failed_at"]), kind)
                case "hung" if "quiet_s" in fields:
                    self._hangs += 1
                case "seems_hung":
                    self._hangs += 1

    def at(self, now_s: float) -> Counts:
        """The counters now."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._use] += now_s - self._since_s
            return Counts(seconds, dict(self._failures), self._hangs, self._steps_repeated, self._last_failure)

    def _turn(self, use: TimeUse, now_s: float) -> None:
        self._seconds[self._use] += now_s - self._since_s
        self._use, self._since_s = use, now_s

    def _progress(self, fields: Mapping[str, Any], now_s: float) -> None:
        if self._use is TimeUse.STARTING:
            self._turn(TimeUse.PRODUCTIVE, now_s)
        first = [step for step in fields.get("first_steps", ()) if step >= 0]
        if first:
            self._steps_repeated += max(0, self._newest_step - min(first) + 1)
        self._newest_step = max(fields["steps"])
