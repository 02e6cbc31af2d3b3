"""`metrics.jsonl`: one JSON line per optimizer step, in order, each step once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, TypeAlias

# What is known of a step, by name; `step` is always there. docs/trainer.md lists the names.
Line: TypeAlias = dict[str, float]


class Metrics:
    """The file, continued after the line of `restored_step`.

    Later lines belong to steps that were done and are lost: new lines overwrite them. `done` is the newest step that is
    known to be done, besides those in the file. `steps_lost` counts all lost steps since the run began; a step that is
    lost twice counts twice. Every line contains the count, so that it survives the process. `newest` is the step of the
    last line that counts.
    """

    def __init__(self, path: Path, restored_step: int, *, done: int = 0) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = self.newest = self.steps_lost = 0
        with path.open("rb") as file:
            for row in file:
                record = _record(row)
                if record is None:
                    break
                step, self.steps_lost = int(record["step"]), int(record.get("steps_lost", 0))
                done = max(done, step)
                if step <= restored_step:
                    self._end, self.newest = self._end + len(row), step
        # If this process ends before its first line, the next start counts these steps again.
        self.steps_lost += max(0, done - restored_step)

    def append(self, line: Line) -> None:
        """Add one line. If it raises OSError, the file is as before: a full disk leaves no half line."""
        content = json.dumps({**line, "steps_lost": self.steps_lost}).encode() + b"\n"
        written = os.pwrite(self._descriptor, content, self._end)
        if written < len(content):
            os.ftruncate(self._descriptor, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end, self.newest = self._end + written, int(line["step"])
        # After a restart there may be lost lines, or half a line of a killed writer.
        if os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)

    def sync(self) -> None:
        """Make all lines durable. Call it before a checkpoint: a restart from there never writes these lines again."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _record(row: bytes) -> dict[str, Any] | None:
    """The row's values; None for half a row, or for a line that is not from here."""
    try:
        # Not `parse_json`: a loss may be NaN.
        record = json.loads(row)
        int(record["step"]), int(record.get("steps_lost", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return record if row.endswith(b"\n") and isinstance(record, dict) else None
