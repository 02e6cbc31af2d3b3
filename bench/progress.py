"""Shows how far a long run is."""

from __future__ import annotations

import sys

from bench.plan import Task


class Progress:
    """Prints a line per round to stderr. On a terminal it also shows the current turn."""

    def __init__(self) -> None:
        self._round = ""
        self._live = sys.stderr.isatty()

    def begin(self, task: Task, left: int) -> None:
        """A turn begins; `left` turns come after it."""
        if task.round != self._round:
            self._round = task.round
            self.say(f"{task.round}; {left} turns left")
        if self._live:
            print(f"\r\033[K  {task.key}", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        print(("\r\033[K" if self._live else "") + text, file=sys.stderr, flush=True)
