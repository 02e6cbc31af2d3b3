"""How far a long run is, and about how long it still takes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from statistics import fmean

from bench.plan import Task


class Estimate:
    """What is left: turns of a key take as long as those before, the others as long as was guessed."""

    def __init__(self) -> None:
        self._took_s: dict[str, list[float]] = {}

    def took(self, task: Task, seconds: float) -> None:
        """Learn from a turn."""
        self._took_s.setdefault(task.key, []).append(seconds)

    def of(self, tasks: Iterable[Task]) -> float:
        """Seconds for these turns."""
        return sum(fmean(known) if (known := self._took_s.get(task.key)) else task.guess_s for task in tasks)


def duration(seconds: float) -> str:
    """In words, as rough as an estimate is."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """A line per round, to stderr; on a terminal also what is being done now."""

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
