"""Writes the time of each stage of a generation as JSON lines, which show where a restart's time went."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from elaunch.agent.output.streams import LogFile

NAME = "timeline.jsonl"
# The generation of events before the first rank table.
NO_GENERATION = -1


class Timeline:
    """`timeline.jsonl` in `folder`; without a folder nothing is written.

    `later` runs the writing in another thread: a slow disk must not hold the agent's loop. `warn` is called for a disk
    error, after which no more is written.
    """

    def __init__(
        self, folder: Path | None, warn: Callable[[str], None], later: Callable[[Callable[[], object]], None]
    ) -> None:
        self._file = LogFile(str(folder / NAME), warn) if folder else None
        self._later = later

    def stamp(self, generation: int, event: str, **fields: int | str) -> None:
        """Note that `event` happens now. May be called from any thread.

        `at` is the wall clock (s), for people; `monotonic_s` is CLOCK_MONOTONIC, which every process of a host shares.
        """
        file = self._file
        if file is None:
            return
        entry = {"generation": generation, "event": event, "at": time.time(), "monotonic_s": time.monotonic(), **fields}
        line = json.dumps(entry).encode() + b"\n"
        self._later(lambda: file.write(line))
