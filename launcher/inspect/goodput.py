"""Where the job's time went, each moment in exactly one stage, and the share that counts: ETTR (pure).

ETTR is the effective training time ratio: productive training time / wall time (Kokolis et al., "Revisiting Reliability
in Large-Scale Machine Learning Research Clusters", arXiv:2410.21680). Steps that a failure lost are not productive,
although workers were busy with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from elaunch.launcher.inspect.history import History, PastGeneration
from elaunch.launcher.inspect.node_log import known_or


class Stage(Enum):
    """What the job did at a moment: its name in `--json`, and what it is."""

    START_UP = "start_up", "start-up", "from the command to the first step: imports, rendezvous, restoring"
    TRAINING = "training", "training", "steps that count in the end"
    LOST = "lost_steps", "lost work", "steps that a failure undid"
    RUNNING = "running", "workers ran", "the program reports no steps, so how much of this was training is unknown"
    DETECTION = "detection", "detection", "from the failure until an agent knew of it"
    STOP = "stop", "stop", "saving the state and ending the other workers"
    RENDEZVOUS = "rendezvous", "rendezvous", "until all nodes agreed on the new ranks"
    SPAWN = "spawn", "spawn", "starting the workers: fork, imports, process group"
    RESTORE = "restore", "restore", "restoring the state, up to the first step"
    END = "end", "end", "from the first exit of a worker that was done to the end of the command"

    def __init__(self, key: str, label: str, meaning: str) -> None:
        self.key, self.label, self.meaning = key, label, meaning


@dataclass(frozen=True)
class Goodput:
    """The time in each stage; together they are the job's. `ettr` is NaN if no step is known.

    `recoveries_s` has the time from a generation's end to the next step (or until workers ran), by generation; without
    those after which nothing worked.
    """

    seconds: Mapping[Stage, float]
    ettr: float
    recoveries_s: Mapping[int, float]


def goodput(history: History) -> Goodput:
    """The stages of the job, from the times of its generations."""
    walk = _Walk(history.wall_s)
    knows_steps = history.knows_steps
    has_worked = False
    for generation in history.generations:
        if has_worked:
            walk.to(Stage.RENDEZVOUS, generation.sealed_s)
            walk.to(Stage.SPAWN, known_or(generation.ready_s, generation.forked_s))
            if knows_steps:
                walk.to(Stage.RESTORE, known_or(generation.trains_s, generation.ends_s))
        else:
            begun_s = generation.trains_s if knows_steps else generation.forked_s
            walk.to(Stage.START_UP, known_or(begun_s, generation.ends_s))
        works = not math.isnan(generation.trains_s if knows_steps else generation.forked_s)
        if works and knows_steps:
            walk.train(generation)
        elif works:
            walk.to(Stage.RUNNING, known_or(generation.ends_s, history.wall_s))
        has_worked = has_worked or works
        if generation is not history.generations[-1] or history.end.outcome == "failed":
            walk.to(Stage.DETECTION, generation.noted_s)
            walk.to(Stage.STOP, generation.cleared_s)
    if history.generations:
        walk.to(Stage.END if has_worked else Stage.START_UP, history.wall_s)
    ettr = walk.seconds[Stage.TRAINING] / history.wall_s if knows_steps and history.wall_s > 0 else math.nan
    return Goodput(walk.seconds, ettr, _recoveries_s(history, knows_steps=knows_steps))


class _Walk:
    """Goes through the job's time once; each step of it takes a stage up to a moment, never back."""

    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s
        self._now_s = 0.0
        self.seconds = dict.fromkeys(Stage, 0.0)

    def to(self, stage: Stage, until_s: float) -> None:
        """Up to `until_s` the job was in `stage`; nothing if that is over or not known."""
        until_s = min(until_s, self._wall_s)
        if until_s > self._now_s:
            self.seconds[stage] += until_s - self._now_s
            self._now_s = until_s

    def train(self, generation: PastGeneration) -> None:
        """The steps of a generation: first those that count, then those that were lost."""
        ends_s = min(known_or(generation.ends_s, self._wall_s), self._wall_s)
        done = generation.last_step - generation.first_step + 1
        kept_share = (done - generation.steps_lost) / done if done > 0 else 0.0
        self.to(Stage.TRAINING, self._now_s + max(ends_s - self._now_s, 0.0) * kept_share)
        self.to(Stage.LOST, ends_s)


def _recoveries_s(history: History, *, knows_steps: bool) -> dict[int, float]:
    """By generation, the time from its end until the job was at work again."""
    found: dict[int, float] = {}
    resumes_s = math.nan
    for each in reversed(history.generations):
        if each.has_run and not math.isnan(resumes_s - each.ends_s):
            found[each.generation] = resumes_s - each.ends_s
        resumes_s = known_or(each.trains_s if knows_steps else each.forked_s, resumes_s)
    return found
