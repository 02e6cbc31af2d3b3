"""Where the job's time went, each moment in exactly one stage, and the share that counts: ETTR (pure).

ETTR is the effective training time ratio: productive training time / wall time (Kokolis et al., "Revisiting Reliability
in Large-Scale Machine Learning Research Clusters", arXiv:2410.21680). Steps that a failure lost are not productive,
although workers were busy with them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, takewhile
from statistics import median

from elaunch.launcher.report_page.history import History, PastGeneration, known_or


class Stage(Enum):
    """What the job did at a moment. The value is its name for programs, in `--json`."""

    START_UP = "start_up"
    TRAINING = "training"
    LOST = "lost_steps"
    RUNNING = "running"
    DETECTION = "detection"
    STOP = "stop"
    RENDEZVOUS = "rendezvous"
    SPAWN = "spawn"
    RESTORE = "restore"
    END = "end"

    @property
    def words(self) -> str:
        return _WORDS[self][0]

    @property
    def meaning(self) -> str:
        return _WORDS[self][1]


_WORDS = {
    Stage.START_UP: ("start-up", "from the command to the first step: imports, rendezvous, restoring"),
    Stage.TRAINING: ("training", "steps that count in the end"),
    Stage.LOST: ("lost work", "steps that a failure undid, and the step that it interrupted"),
    Stage.RUNNING: ("workers ran", "the program reports no steps, so nobody knows how much of this was training"),
    Stage.DETECTION: ("detection", "from the failure until an agent knew of it"),
    Stage.STOP: ("stop", "saving the state and ending the other workers"),
    Stage.RENDEZVOUS: ("rendezvous", "until all nodes agreed on the new ranks"),
    Stage.SPAWN: ("spawn", "starting the workers: fork, imports, process group"),
    Stage.RESTORE: ("restore", "restoring the state, up to the first step"),
    Stage.END: ("end", "after the last step: evaluation, last checkpoint, exit"),
}


# What a generation's end costs while it is still that generation.
_WASTED = (Stage.LOST, Stage.DETECTION, Stage.STOP)
# With the first of these the next generation is at work. Its steps may be lost later.
_AT_WORK = (Stage.TRAINING, Stage.LOST, Stage.RUNNING, Stage.END)


@dataclass(frozen=True)
class StagePart:
    """A stretch of the job's time in one stage, during `generation` (or on the way to it)."""

    stage: Stage
    begin_s: float
    end_s: float
    generation: int

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Goodput:
    """The parts of the job's time, in order and without gaps. `ettr` is NaN if no step is known.

    `recoveries_s` has the time from a failure, or another end of a generation, to the next step (or until workers ran),
    by generation; without those after which nothing went on.
    """

    parts: tuple[StagePart, ...]
    wall_s: float
    ettr: float
    recoveries_s: Mapping[int, float]

    @property
    def recovery_s(self) -> float:
        """The median time until the job went on, NaN if there is none."""
        return median(self.recoveries_s.values()) if self.recoveries_s else math.nan

    def seconds(self, stage: Stage) -> float:
        return sum(part.length_s for part in self.parts if part.stage is stage)

    def cost(self, generation: int) -> tuple[StagePart, ...]:
        """What a generation's end cost: its lost work, and all from there to the next step (or until workers ran)."""
        found: list[StagePart] = []
        for part in self.parts[bisect_left(self.parts, generation, key=lambda part: part.generation) :]:
            if part.generation == generation and part.stage not in _WASTED:
                continue
            if part.generation > generation and part.stage in _AT_WORK:
                return tuple(found)
            found.append(part)
        return tuple(found)


def goodput(history: History) -> Goodput:
    """The stages of the job, from the times of its generations."""
    walk = _Walk(history.wall_s)
    knows_steps = history.knows_steps
    has_trained = False
    for generation in history.generations:
        if has_trained:
            walk.start_again(generation, knows_steps)
        elif math.isnan(generation.trains_s) and (knows_steps or math.isnan(generation.forked_s)):
            walk.to(Stage.START_UP, generation.ends_s, generation)
        else:
            begun_s = generation.forked_s if math.isnan(generation.trains_s) else generation.trains_s
            walk.to(Stage.START_UP, begun_s, generation)
        if not knows_steps:
            walk.to(Stage.RUNNING, known_or(generation.ends_s, history.wall_s), generation)
            has_trained = has_trained or not math.isnan(generation.forked_s)
        elif not math.isnan(generation.trains_s):
            walk.train(generation)
            has_trained = True
        if generation.number != history.generations[-1].number or history.end.outcome == "failed":
            walk.to(Stage.DETECTION, generation.noted_s, generation)
            walk.to(Stage.STOP, generation.cleared_s, generation)
    if history.generations:
        walk.to(Stage.END if has_trained else Stage.START_UP, history.wall_s, history.generations[-1])
    trained_s = sum(part.length_s for part in walk.parts if part.stage is Stage.TRAINING)
    ettr = trained_s / history.wall_s if history.knows_steps and history.wall_s > 0 else math.nan
    return Goodput(tuple(walk.parts), history.wall_s, ettr, _recoveries_s(walk.parts, history))


def _recoveries_s(parts: Sequence[StagePart], history: History) -> dict[int, float]:
    """By generation, the time from its end until the next one was at work; from the last generation to the first."""
    newest = history.last_that_ran
    # A job may succeed without another step. The end of any other is no work.
    at_work = [stage for stage in _AT_WORK if stage is not Stage.END or history.end.outcome == "succeeded"]
    found: dict[int, float] = {}
    # From the beginning of the generation after, until the job was at work; NaN if it never was.
    until_work_s = math.nan
    for number, group in groupby(reversed(parts), key=lambda part: part.generation):
        own = [*group][::-1]
        lost_s = sum(part.length_s for part in own if part.stage in (Stage.DETECTION, Stage.STOP))
        if number < newest and lost_s + until_work_s > 0:
            found[number] = lost_s + until_work_s
        before = [*takewhile(lambda part: part.stage not in at_work, own)]
        is_at_work = len(before) < len(own)
        until_work_s = sum(part.length_s for part in before) + (0.0 if is_at_work else until_work_s)
    return dict(sorted(found.items()))


class _Walk:
    """Goes through the job's time once; each step of it takes a stage up to a moment, never back."""

    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s
        self._now_s = 0.0
        self.parts: list[StagePart] = []

    def to(self, stage: Stage, until_s: float, generation: PastGeneration) -> None:
        """Up to `until_s` the job was in `stage`; nothing if that is over or not known."""
        until_s = min(until_s, self._wall_s)
        if until_s > self._now_s:
            self.parts.append(StagePart(stage, self._now_s, until_s, generation.number))
            self._now_s = until_s

    def start_again(self, generation: PastGeneration, knows_steps: bool) -> None:
        """The stages between two generations."""
        self.to(Stage.RENDEZVOUS, generation.sealed_s, generation)
        self.to(Stage.SPAWN, known_or(generation.ready_s, generation.forked_s), generation)
        if knows_steps:
            self.to(Stage.RESTORE, known_or(generation.trains_s, generation.ends_s), generation)

    def train(self, generation: PastGeneration) -> None:
        """The steps of a generation: first those that count, then those that were lost."""
        ends_s = min(known_or(generation.ends_s, self._wall_s), self._wall_s)
        window_s = max(ends_s - self._now_s, 0.0)
        done = generation.last_step - generation.first_step + 1
        kept = generation.kept_step - generation.first_step + 1
        if not math.isnan(generation.trained_s):
            counted_s = min(generation.trained_s, window_s)
        else:
            counted_s = window_s * kept / done if done > 0 else 0.0
        self.to(Stage.TRAINING, self._now_s + counted_s, generation)
        self.to(Stage.LOST, ends_s, generation)


def by_stage(parts: Iterable[StagePart]) -> Sequence[tuple[Stage, float]]:
    """Each stage that took time, in the order of `Stage`."""
    seconds = dict.fromkeys(Stage, 0.0)
    for part in parts:
        seconds[part.stage] += part.length_s
    return [(stage, length_s) for stage, length_s in seconds.items() if length_s > 0]
