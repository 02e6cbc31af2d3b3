"""`metrics.jsonl`: one JSON line per optimizer step, in the order of the steps, each step once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TypedDict


class Line(TypedDict):
    """`loss` is the mean over the global batch, nats per byte; `tokens` and `seconds` are this step's alone."""

    step: int
    loss: float
    tokens: int
    seconds: float
    world_size: int
    generation: int


class Metrics:
    """The file, open for appending after the last line that belongs to `restored_step` or an earlier step.

    What lies behind it, steps that will be computed again or half a line of a killed writer, is cut off.
    """

    def __init__(self, path: Path, restored_step: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = _end_of(path, restored_step)
        os.ftruncate(self._descriptor, self._end)

    def append(self, line: Line) -> None:
        """Add one line; raises OSError with the file as it was before (a full disk leaves no half line)."""
        content = json.dumps(line).encode() + b"\n"
        written = os.pwrite(self._descriptor, content, self._end)
        if written < len(content):
            os.ftruncate(self._descriptor, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written

    def sync(self) -> None:
        """Make all lines durable: before the checkpoint that makes a restart skip their steps."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _end_of(path: Path, restored_step: int) -> int:
    """The offset behind the last whole line up to `restored_step`."""
    end = 0
    with path.open("rb") as file:
        for row in file:
            if not row.endswith(b"\n") or _step_of(row) > restored_step:
                break
            end += len(row)
    return end


def _step_of(row: bytes) -> float:
    """The row's step; infinity where the row is no metrics line, so that it is cut."""
    try:
        return int(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
