"""`metrics.jsonl`: one JSON line per optimizer step, in order, each step once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any, TypedDict


class Line(TypedDict):
    """`loss` is the mean over the global batch, in nats per byte; `tokens` counts this step only.

    `seconds` is the time since the last step, as the mean over the ranks.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    world_size: int
    generation: int


class Metrics:
    """The file, continued after the line of `restored_step`. `line` is that line, in case the file lacks it.

    Later lines belong to steps that were done and are lost: new lines overwrite them. `done` is the newest step that is
    known to be done, besides those in the file. `steps_lost` counts all lost steps since the run began; a step that is
    lost twice counts twice. Every line contains the count, so that it survives the process.
    """

    def __init__(self, path: Path, restored_step: int, *, line: Line | None = None, done: int = 0) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        rows = _Rows(path, restored_step)
        self._end = rows.end
        # If this process ends before its first line, the next start counts these steps again.
        self.steps_lost = rows.steps_lost + max(0, max(rows.newest, done) - restored_step)
        if line is not None and rows.kept < restored_step == line["step"]:
            # Rank 0 was killed before it could write this line.
            with contextlib.suppress(OSError):
                self.append(line)

    def append(self, line: Line, at: float | None = None) -> None:
        """Add one line. If it raises OSError, the file is as before: a full disk leaves no half line.

        `at` is the wall clock at the end of the step, None if it is not known.
        """
        when = {} if at is None else {"at": round(at, 6)}
        content = json.dumps({**line, **when, "steps_lost": self.steps_lost}).encode() + b"\n"
        written = os.pwrite(self._descriptor, content, self._end)
        if written < len(content):
            os.ftruncate(self._descriptor, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written
        # After a restart there may be lost lines, or half a line of a killed writer.
        if os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)

    def sync(self) -> None:
        """Make all lines durable. Call it before a checkpoint: a restart from there never writes these lines again."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _Rows:
    """The content of a metrics file. `kept` is its last step up to `restored_step`, `end` the offset behind that line.

    `newest` is the step of the last whole line, and `steps_lost` the count in that line.
    """

    def __init__(self, path: Path, restored_step: int) -> None:
        self.end = self.kept = self.newest = self.steps_lost = 0
        with path.open("rb") as file:
            for row in file:
                record = _record(row)
                if record is None:
                    break
                self.newest = int(record["step"])
                self.steps_lost = int(record.get("steps_lost", 0))
                if self.newest <= restored_step:
                    self.end += len(row)
                    self.kept = self.newest


def _record(row: bytes) -> dict[str, Any] | None:
    """The row's values; None for half a row, or for a line that is not from here."""
    try:
        # Not `parse_json`: a loss may be NaN.
        record = json.loads(row)
        int(record["step"]), int(record.get("steps_lost", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return record if row.endswith(b"\n") and isinstance(record, dict) else None
