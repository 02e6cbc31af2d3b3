"""Reads the ranks' marks of a training whose workers are killed: steps done, steps lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.stamps import Stamp, parse

DONE, RESTORED, STARTED = "done", "restored", "script"
# The generation and the step. They tell the executions of one step apart.
Execution = tuple[int, int]

NEXT_STEP = "step k+1 done"


@dataclass
class History:
    """All marks up to now, indexed, since there are thousands.

    `done` has the time (s) of each rank for each execution of a step. `marks` has all other marks by generation and
    event. The newest mark of a rank counts.
    """

    done: dict[Execution, dict[int, float]] = field(default_factory=dict)
    marks: dict[tuple[int, str], dict[int, Stamp]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)

    def add(self, stamps: Iterable[Stamp]) -> None:
        """Take in these stamps."""
        for stamp in stamps:
            execution = (stamp.generation, stamp.step)
            if stamp.event == DONE:
                self.done.setdefault(execution, {})[stamp.rank] = stamp.monotonic_s
                self.newest[stamp.generation] = max(self.newest.get(stamp.generation, 0), stamp.step)
            else:
                self.marks.setdefault((stamp.generation, stamp.event), {})[stamp.rank] = stamp

    def pid(self, rank: int) -> int | None:
        """The newest process of a rank, or None if the rank has never begun."""
        started = [
            (generation, of[rank].pid)
            for (generation, event), of in self.marks.items()
            if event == STARTED and rank in of
        ]
        return max(started)[1] if started else None

    def all_done_s(self, generation: int, step: int, ranks: int) -> float | None:
        """When the last of all ranks had done a step, or None while a rank has not."""
        times = self.done.get((generation, step), {})
        return max(times.values()) if len(times) == ranks else None

    def restored(self, generation: int) -> int | None:
        """The step that a generation went on from, or None before a rank has restored it."""
        of = self.marks.get((generation, RESTORED), {})
        return min(stamp.step for stamp in of.values()) if of else None

    def completed(self, generation: int) -> int:
        """The last step that any rank had done before that generation, or 0."""
        return max((step for before, step in self.newest.items() if before < generation), default=0)


class Tail:
    """Reads a growing file of stamps, each stamp once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Stamp]:
        """The stamps since the last call. A line that is still being written comes with the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return parse(whole.decode())


@dataclass(frozen=True)
class Resumed:
    """A restart: `lost` steps had to be made again, `next_step` is the first one that nobody had completed before."""

    lost: int
    next_step: int


def resumed(history: History, generation: int) -> Resumed | None:
    """What the failure before `generation` cost; None before its workers have restored anything."""
    restored = history.restored(generation)
    if restored is None:
        return None
    completed = history.completed(generation)
    # A rank that is killed just after a step's end has not marked the step. The step may be kept all the same.
    return Resumed(max(0, completed - restored), max(completed, restored) + 1)
