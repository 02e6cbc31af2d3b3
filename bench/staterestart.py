"""SIGKILL of one worker: the steps that its group loses, and the time until the first new step is done.

Two sides: elaunch with its Keeper, and the usual script under torchrun.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.contenders import ELAUNCH, TORCHRUN, Contender
from bench.job import SCRIPTS, Fact, Job, Trouble
from bench.samples import Sample
from bench.stamps import Stamp, parse

DONE, RESTORED, STARTED = "done", "restored", "script"
# The generation and the step. They tell the executions of one step apart.
Execution = tuple[int, int]
SECTION = "state: restart"
# This number divides the demo model's batch. It is twice the number of cores, so workers compete in a restart.
WORKERS = 4
_START_LIMIT_S = 120.0
# After this step all ranks are past the first steps, which are special.
_STEADY_STEPS = 5
LOST, NEXT_STEP = "steps lost", "step k+1 done"
# Kills are spread over this many steps, the longest distance between two saves.
_SPREAD_STEPS = 50
# A step takes less time than this, so a kill may strike at every moment of a step.
_SPREAD_S = 0.2


@dataclass(frozen=True)
class Side:
    """A launcher with a script. All sides train the same model. `name` stands in the tables for both together."""

    name: str
    contender: Contender
    script: str
    variables: Mapping[str, str] = field(default_factory=dict)


KEPT = Side(ELAUNCH.name, ELAUNCH, "kept.py")


def usual(save_every: int) -> Side:
    """The usual script under torchrun in torchrun's better case: each generation has a store of its own."""
    variables = {"BENCH_SAVE_EVERY": str(save_every)}
    return Side(f"torchrun, torch.save every {save_every}", TORCHRUN.with_fresh_store(), "usual.py", variables)


SIDES = (KEPT, usual(10), usual(50))


class Trained:
    """A side's job and its workers' marks. On entry the context manager waits until all are training."""

    def __init__(self, side: Side, *, max_restarts: int, workers: int = WORKERS) -> None:
        self.side, self.workers = side, workers
        self.job = Job(
            side.contender,
            workers,
            (str(SCRIPTS / side.script),),
            max_restarts=max_restarts,
            env=side.variables,
        )
        self._tail = Tail(self.job.stamps_path)
        self._history = History()

    def __enter__(self) -> Trained:
        try:
            self.wait_for(lambda h: h.all_done_s(0, _STEADY_STEPS, self.workers), "all were training", _START_LIMIT_S)
        except BaseException:
            self.job.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.job.close()

    @property
    def history(self) -> History:
        """All marks up to now, freshly read."""
        self._history.add(self._tail.read())
        return self._history

    def wait_for(self, fact: Callable[[History], Fact | None], what: str, limit_s: float) -> Fact:
        """The first value of `fact(history)` that is not None. Raises Trouble if the job ends or the time is over."""
        return self.job.wait_for(lambda: fact(self.history), what, limit_s)

    def kill(self, rng: random.Random) -> float:
        """SIGKILL a random rank's newest process. Returns the time (s) just before. Raises Trouble if it is gone."""
        rank = rng.randrange(self.workers)
        pid = self.history.pid(rank)
        assert pid is not None
        killed_s = time.monotonic()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise Trouble(f"rank {rank} ended before it was killed") from None
        return killed_s


def restarts(side: Side, count: int, limit_s: float, rng: random.Random) -> Iterator[Sample]:
    """One job in which a random rank is killed `count` times. Yields a sample for each kill.

    If a restart takes longer than `limit_s`, or the job dies, that is the last sample.
    """
    try:
        with Trained(side, max_restarts=count + 5) as trained:
            for generation in range(1, count + 1):
                yield _restart(trained, generation, limit_s, rng)
    except Trouble as trouble:
        yield Sample(SECTION, side.name, WORKERS, why=str(trouble))


def _restart(trained: Trained, generation: int, limit_s: float, rng: random.Random) -> Sample:
    wanted = trained.history.newest[generation - 1] + rng.randrange(_SPREAD_STEPS)
    trained.wait_for(lambda h: h.newest[generation - 1] >= wanted or None, "a few steps were made", limit_s)
    time.sleep(rng.uniform(0, _SPREAD_S))
    killed_s = trained.kill(rng)

    def is_new(history: History) -> float | None:
        again = resumed(history, generation)
        return None if again is None else history.all_done_s(generation, again.next_step, trained.workers)

    done_s = trained.wait_for(is_new, "all had made a new step", limit_s)
    again = resumed(trained.history, generation)
    assert again is not None
    values = {LOST: float(again.lost), NEXT_STEP: done_s - killed_s}
    return Sample(SECTION, trained.side.name, trained.workers, values)


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
