"""The ledger: a record of which rank computed which samples in which step."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from elaunch.trainer.data.order import Micro, Order
from elaunch.trainer.ledger.audit import FORMAT, Verdict, verdict

_NAME = re.compile(r"generation-(\d+)-rank-(\d+)\.jsonl")


class Ledger:
    """One rank's file of one generation in `folder`, which all ranks share.

    The generation continues after step `after` (`Keeper.step`). Each micro-batch and each step writes a short line.
    Nothing is synced: the lines of a killed process are kept, but a power cut may lose lines. Raises OSError if the
    file cannot be created or exists, on rank 0 also if another run has written under a later generation.
    """

    def __init__(
        self, folder: str | Path, order: Order, *, rank: int, world_size: int, generation: int, after: int
    ) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = _path(folder, generation, rank)
        group = {"generation": generation, "rank": rank, "world_size": world_size, "after": after}
        header = {"ledger": FORMAT, **group, "order": dataclasses.asdict(order)}
        # There may be thousands of ranks and files, so one rank lists all.
        if rank == 0 and next_generation(folder) > generation + 1:
            raise _used(Path(folder))
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise _used(self.path) from None
        self._end = 0
        self._append(header)

    def record(self, step: int, micro: Micro) -> None:
        """Record that this rank computes `micro` of `step`. Call it before backward, which all-reduces the gradients.

        If it raises OSError, the file is as before (a full disk leaves no half line), and the verdict misses the step.
        """
        if micro.number < 0:
            return
        self._append({"step": step, "micro": micro.number, "samples": micro.samples})

    def commit(self, step: int) -> None:
        """Record that `step` is done. Call it after the optimizer's step. Raises OSError as `record` does."""
        self._append({"done": step})

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: dict[str, object]) -> None:
        content = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        written = os.pwrite(self._descriptor, content, self._end)
        if written < len(content):
            os.ftruncate(self._descriptor, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        self._end += written


def _path(folder: str | Path, generation: int, rank: int) -> Path:
    return Path(folder) / f"generation-{generation:04d}-rank-{rank:05d}.jsonl"


def _used(path: Path) -> FileExistsError:
    way_out = "an earlier run has written it; take next_generation(folder), or another folder"
    return FileExistsError(errno.EEXIST, way_out, path)


def next_generation(folder: str | Path, generation: int = 0) -> int:
    """The generation to write under: the group's own, or a greater one that no earlier run has used in `folder`.

    One rank calls this before any rank writes, and broadcasts the result.
    """
    names = [path.name for path in Path(folder).glob("generation-*.jsonl")]
    return max([generation, *(int(match[1]) + 1 for name in names if (match := _NAME.fullmatch(name)))])


def audit_folder(folder: str | Path, *, steps: int | None = None) -> Verdict:
    """The verdict on the ledger in `folder`. Raises OSError if it cannot be read."""
    return verdict([_lines(path) for path in sorted(Path(folder).iterdir()) if _NAME.fullmatch(path.name)], steps=steps)


def _lines(path: Path) -> Iterator[str]:
    """The file's lines. The file is closed after the first line: all headers are read before any further line."""
    with path.open("rb") as file:
        header = file.readline()
    yield header.decode(errors="replace")
    with path.open("rb") as file:
        file.seek(len(header))
        for line in file:
            yield line.decode(errors="replace")
