"""Reads the ranks' marks of a training whose workers are killed: steps done, steps lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.stamps import Stamp, parse

BEGUN, DONE, RESTORED, STARTED = "begun", "done", "restored", "script"
# The generation and the step. They tell the executions of one step apart.
Execution = tuple[int, int]

# (name in the tables, the agent's event, how many generations before the new one, which of several times counts)
_AGENT = (
    ("noticed", "exited", 1, min),
    ("survivors told", "told", 1, min),
    ("saved by all survivors", "saved", 1, max),
    ("all killed", "stopped", 1, max),
    ("sealed", "sealed", 0, max),
    ("last fork", "forked", 0, max),
)
# (name in the tables, the workers' event). The last worker's time counts.
_WORKERS = (
    ("script's first line", STARTED),
    ("torch imported", "torch"),
    ("group ready", "group"),
    ("state restored", RESTORED),
)
FIRST_STEP, NEXT_STEP = "first step done", "step k+1 done"
STAGES = (*(name for name, *_ in _AGENT), *(name for name, _ in _WORKERS), FIRST_STEP, NEXT_STEP)


@dataclass
class History:
    """All marks up to now, indexed, since there are thousands.

    `begun` and `done` have the time (s) of each rank for each execution of a step. `marks` has all other marks by
    generation and event. The newest mark of a rank counts.
    """

    begun: dict[Execution, dict[int, float]] = field(default_factory=dict)
    done: dict[Execution, dict[int, float]] = field(default_factory=dict)
    marks: dict[tuple[int, str], dict[int, Stamp]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)

    def add(self, stamps: Iterable[Stamp]) -> None:
        """Take in these stamps."""
        for stamp in stamps:
            execution = (stamp.generation, stamp.step)
            if stamp.event == BEGUN:
                self.begun.setdefault(execution, {})[stamp.rank] = stamp.monotonic_s
            elif stamp.event == DONE:
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


def restart_stages(
    agent: Sequence[Stamp], history: History, generation: int, ranks: int, since_s: float
) -> dict[str, float]:
    """Seconds from the kill at `since_s` to each stage of `generation`, which the kill opened, and of its workers.

    Stages without a stamp are left out. `agent` has the stamps of elaunch's agent; other launchers have none.
    """
    times = {}
    for name, event, back, first_or_last in _AGENT:
        found = [s.monotonic_s for s in agent if (s.generation, s.event) == (generation - back, event)]
        found = [at_s for at_s in found if at_s >= since_s]
        if found:
            times[name] = first_or_last(found)
    for name, event in _WORKERS:
        of = history.marks.get((generation, event), {})
        if len(of) == ranks:
            times[name] = max(stamp.monotonic_s for stamp in of.values())
    restored, again = history.restored(generation), resumed(history, generation)
    if restored is not None and again is not None:
        for name, step in ((FIRST_STEP, restored + 1), (NEXT_STEP, again.next_step)):
            at_s = history.all_done_s(generation, step, ranks)
            if at_s is not None:
                times[name] = at_s
    return {name: at_s - since_s for name, at_s in times.items()}
