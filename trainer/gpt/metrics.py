"""`metrics.jsonl`: one JSON line per optimizer step, in the order of the steps, each step once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any, TypedDict


class Line(TypedDict):
    """`loss` is the mean over the global batch, nats per byte; `tokens` are this step's alone.

    `seconds` since the step before, mean over the ranks.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    world_size: int
    generation: int


class Metrics:
    """The file, to be continued after the line of `restored_step`; `line` is that line, should it be missing there.

    What lies behind it was done and is lost: the next line takes its place. `done` is the newest step that is known to
    have been done; of the file's own lines it is known anyway. `steps_lost` counts such steps since the run began, each
    time that they are lost; every line has it, so that the count survives the process.
    """

    def __init__(self, path: Path, restored_step: int, *, line: Line | None = None, done: int = 0) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        rows = _Rows(path, restored_step)
        self._end = rows.end
        # Counted again by the next start if this one ends before its first line.
        self.steps_lost = rows.steps_lost + max(0, max(rows.newest, done) - restored_step)
        if line is not None and rows.kept < restored_step == line["step"]:
            # Rank 0 was killed before it could write it.
            with contextlib.suppress(OSError):
                self.append(line)

    def append(self, line: Line) -> None:
        """Add one line; raises OSError with the file as it was before (a full disk leaves no half line)."""
        content = json.dumps({**line, "steps_lost": self.steps_lost}).encode() + b"\n"
        written = os.pwrite(self._descriptor, content, self._end)
        if written < len(content):
            os.ftruncate(self._descriptor, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written
        # After a restart there may be lost lines, or half a line of a killed writer.
        if os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)

    def sync(self) -> None:
        """Make all lines durable: before a checkpoint makes a restart skip their steps."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _Rows:
    """What a file of lines says: `end` is the offset behind the last one up to `restored_step`, `kept` its step.

    `newest` is the step of the last whole line, `steps_lost` what that one has counted.
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
    """The row's values; None where it is half a row, or no metrics line."""
    try:
        # A loss may be NaN here.
        record = json.loads(row)
        int(record["step"]), int(record.get("steps_lost", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return record if row.endswith(b"\n") and isinstance(record, dict) else None
