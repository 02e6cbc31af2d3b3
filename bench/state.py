"""The Keeper: the steps and the time that SIGKILL of one worker costs, and the cost while nothing fails.

A kill has two sides: elaunch with its Keeper, and the usual script under torchrun. The steady cost is of steps with the
Keeper and without it, in turns.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.job import ELAUNCH, SCRIPTS, TORCHRUN, Contender, Job, Trouble, kill_rank
from bench.samples import Sample
from bench.stamps import Stamp, all_at_s, at

RESTART_SECTION = "state: restart"
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


def restarts(side: Side, count: int, limit_s: float, rng: random.Random) -> Iterator[Sample]:
    """One job in which a random rank is killed `count` times. Yields a sample for each kill.

    If a restart takes longer than `limit_s`, or the job dies, that is the last sample.
    """
    program = (str(SCRIPTS / side.script),)
    try:
        with Job(side.contender, WORKERS, program, max_restarts=count + 5, env=side.variables) as job:
            job.wait_for(lambda: all_done_s(job.stamps(), 0, _STEADY_STEPS), "all were training", _START_LIMIT_S)
            for generation in range(1, count + 1):
                yield _restart(job, side.name, generation, limit_s, rng)
    except Trouble as trouble:
        yield Sample(RESTART_SECTION, side.name, WORKERS, why=str(trouble))


def _restart(job: Job, name: str, generation: int, limit_s: float, rng: random.Random) -> Sample:
    wanted = completed(job.stamps(), generation) + rng.randrange(_SPREAD_STEPS)
    job.wait_for(lambda: completed(job.stamps(), generation) >= wanted or None, "a few steps were made", limit_s)
    time.sleep(rng.uniform(0, _SPREAD_S))
    rank = rng.randrange(WORKERS)
    killed_s = kill_rank(rank, at(job.stamps(), generation - 1, "script")[rank].pid)

    def is_new() -> tuple[Resumed, float] | None:
        again = resumed(job.stamps(), generation)
        done_s = all_done_s(job.stamps(), generation, again.next_step) if again else None
        return (again, done_s) if again and done_s else None

    again, done_s = job.wait_for(is_new, "all had made a new step", limit_s)
    return Sample(RESTART_SECTION, name, WORKERS, {LOST: float(again.lost), NEXT_STEP: done_s - killed_s})


def all_done_s(stamps: Iterable[Stamp], generation: int, step: int) -> float | None:
    """When the last of all ranks had done a step, or None while a rank has not."""
    return all_at_s((stamp for stamp in stamps if stamp.step == step), generation, "done", WORKERS)


def completed(stamps: Iterable[Stamp], generation: int) -> int:
    """The last step that any rank had done before that generation, or 0."""
    return max((s.step for s in stamps if s.event == "done" and s.generation < generation), default=0)


@dataclass(frozen=True)
class Resumed:
    """A restart: `lost` steps had to be made again, `next_step` is the first one that no rank had completed before."""

    lost: int
    next_step: int


def resumed(stamps: Sequence[Stamp], generation: int) -> Resumed | None:
    """What the failure before `generation` cost; None before its workers have restored anything."""
    restored = [stamp.step for stamp in at(stamps, generation, "restored").values()]
    if not restored:
        return None
    before = completed(stamps, generation)
    # A rank that is killed just after a step's end has not marked the step. The step may be kept all the same.
    return Resumed(max(0, before - min(restored)), max(before, min(restored)) + 1)


COST_SECTION = "state: steady cost"
SIZES_MB = (10, 100, 1000)
COST_WORKERS = 2
COST, PLAIN, WITH_KEEPER = "steady cost, %", "step without the Keeper, s", "step with it, s"
PLAIN_P95, WITH_KEEPER_P95 = "p95 of a step without the Keeper, s", "p95 of a step with it, s"
_COST_LIMIT_S = 2400.0


@dataclass(frozen=True)
class Note:
    """A line of the script: what it measured, a `pair` or its `end`."""

    way: str
    values: Mapping[str, float]


def pairs(size_mb: int, count: int, workers: int) -> Iterator[Sample]:
    """One job of a state of `size_mb` MB (10^6 bytes): `count` pairs of stretches of training."""
    try:
        yield from pair_samples(size_mb, _notes(size_mb, count, workers))
    except Trouble as trouble:
        yield Sample(COST_SECTION, ELAUNCH.name, size_mb, why=str(trouble))


def pair_samples(size_mb: int, notes: Sequence[Note]) -> list[Sample]:
    """The values of scripts/paired.py: s and %."""
    return [
        Sample(
            COST_SECTION,
            ELAUNCH.name,
            size_mb,
            {
                COST: 100 * (note.values["kept"] / note.values["plain"] - 1),
                PLAIN: note.values["plain"],
                WITH_KEEPER: note.values["kept"],
                PLAIN_P95: note.values["plain_p95"],
                WITH_KEEPER_P95: note.values["kept_p95"],
            },
        )
        for note in notes
        if note.way == "pair"
    ]


def _notes(size_mb: int, count: int, workers: int) -> list[Note]:
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        path = Path(folder, "costs.jsonl")
        env = {"BENCH_STATE_BYTES": str(size_mb * 10**6), "BENCH_SAMPLES": str(count), "BENCH_COSTS": str(path)}
        with Job(ELAUNCH, workers, (str(SCRIPTS / "paired.py"),), env=env) as job:

            def ended() -> list[Note] | None:
                notes = read(path.read_text()) if path.exists() else []
                return notes if notes and notes[-1].way == "end" else None

            return job.wait_for(ended, "all was measured", _COST_LIMIT_S)


def read(text: str) -> list[Note]:
    """The notes in JSON lines. A last line without its end is still being written. It is left out."""
    return [
        Note(fields["way"], fields["values"])
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
        for fields in [json.loads(line)]
    ]
