"""Shows how far a long run is, and estimates the time that is left."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from statistics import fmean

from bench.plan import Task


class Estimate:
    """Estimates the time that is left: from earlier turns of the same key, or else from the turn's own guess."""

    def __init__(self) -> None:
        self._took_s: dict[str, list[float]] = {}

    def took(self, task: Task, seconds: float) -> None:
        """Note how long a turn took."""
        self._took_s.setdefault(task.key, []).append(seconds)

    def of(self, tasks: Iterable[Task]) -> float:
        """Seconds for these turns."""
        return sum(fmean(known) if (known := self._took_s.get(task.key)) else task.guess_s for task in tasks)


def duration(seconds: float) -> str:
    """A rough duration in words, for estimates."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """Prints a line per round to stderr. On a terminal it also shows the current turn."""

    def __init__(self) -> None:
        self._round = ""
        self._live = sys.stderr.isatty()

    def begin(self, task: Task, left_s: float) -> None:
        """A turn begins."""
        if task.round != self._round:
            self._round = task.round
            self.say(f"{task.round}; about {duration(left_s)} left")
        if self._live:
            print(f"\r\033[K  {task.key}", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        print(("\r\033[K" if self._live else "") + text, file=sys.stderr, flush=True)
