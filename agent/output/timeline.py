"""Writes what happens to a run as JSON lines: its events, each with its time (docs/events.schema.json)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from elaunch.agent.output.streams import LogFile

NAME = "timeline.jsonl"


class Timeline:
    """`timeline.jsonl` in `folder`; without a folder nothing is written.

    `later` runs the writing in another thread: a slow disk must not hold the agent's loop. `warn` is called for a disk
    error, after which no more is written. `count`, if set, hears of each event too, with its fields and its time on the
    monotonic clock.
    """

    def __init__(
        self, folder: Path | None, warn: Callable[[str], None], later: Callable[[Callable[[], object]], None]
    ) -> None:
        self._file = LogFile(str(folder / NAME), warn) if folder else None
        self._later = later
        self.count: Callable[[str, Mapping[str, object], float], None] | None = None

    def stamp(self, generation: int, event: str, **fields: object) -> None:
        """Note that `event` happens now. May be called from any thread. The values of `fields` have a JSON form.

        `at` is the wall clock (s), for people; `monotonic_s` is CLOCK_MONOTONIC, which every process of a host shares.
        """
        now_s = time.monotonic()
        if self.count:
            self.count(event, fields, now_s)
        file = self._file
        if file is None:
            return
        entry = {"generation": generation, "event": event, "at": time.time(), "monotonic_s": now_s, **fields}
        line = json.dumps(entry).encode() + b"\n"
        self._later(lambda: file.write(line))
