"""The cost of the Keeper's copies in memory, beside copies of the same state by torch.save and DCP."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import ELAUNCH
from bench.job import SCRIPTS, Job, Trouble
from bench.samples import Sample

SECTION = "state: snapshot"
STEADY_SECTION = "state: steady cost"
SIZES_MB = (10, 100, 1000)
WORKERS = 2
# The names in the tables of the ways in which scripts/snapshots.py copies.
KEEPER, SAVE, DCP = ELAUNCH.name, "torch.save", "DCP async_save"
HELD, WHOLE, MEMORY = "training waits, s", "whole after, s", "host memory, MB"
EVERY, STEP, SHARE = "k, steps", "step, s", "share of the time at k, %"
COST, PLAIN, KEPT = "steady cost, %", "step without the Keeper, s", "step with it, s"
PLAIN_P95, KEPT_P95 = "p95 of a step without the Keeper, s", "p95 of a step with it, s"
_WAYS = {"keeper": KEEPER, "torch.save": SAVE, "async_save": DCP}
_SHARED = Path("/dev/shm")
_LIMIT_S = 2400.0


@dataclass(frozen=True)
class Note:
    """A line of a script: the values that it measured for one way of copying."""

    way: str
    values: Mapping[str, float]


def copies(size_mb: int, count: int) -> Iterator[Sample]:
    """One job of a model whose state has `size_mb` MB (10^6 bytes): `count` copies in each way."""
    shared = tempfile.mkdtemp(prefix="bench_", dir=_SHARED)
    try:
        yield from _samples(SECTION, snapshot_samples, "snapshots.py", size_mb, count, {"BENCH_SHARED": shared})
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def pairs(size_mb: int, count: int) -> Iterator[Sample]:
    """One job of a state of `size_mb` MB: `count` pairs of stretches of training with and without the Keeper."""
    return _samples(STEADY_SECTION, pair_samples, "paired.py", size_mb, count, {})


def _samples(
    section: str,
    samples: Callable[[int, Sequence[Note]], list[Sample]],
    script: str,
    size_mb: int,
    count: int,
    env: Mapping[str, str],
) -> Iterator[Sample]:
    asked = {"BENCH_STATE_BYTES": str(size_mb * 10**6), "BENCH_SAMPLES": str(count), **env}
    try:
        yield from samples(size_mb, _notes(script, asked))
    except Trouble as trouble:
        yield Sample(section, KEEPER, size_mb, why=str(trouble))


def snapshot_samples(size_mb: int, notes: Sequence[Note]) -> list[Sample]:
    """The values of scripts/snapshots.py: s, MB, and % of the training's time."""
    paced = next(note.values for note in notes if note.way == "paced")
    found = []
    for note in notes:
        if note.way not in _WAYS:
            continue
        values = {HELD: note.values["held_s"], MEMORY: note.values["memory"] / 1e6}
        if "whole_s" in note.values:
            values[WHOLE] = note.values["whole_s"]
        else:
            share = 100 * note.values["held_s"] / (paced["every"] * paced["step_s"])
            values |= {EVERY: paced["every"], STEP: paced["step_s"], SHARE: share}
        found.append(Sample(SECTION, _WAYS[note.way], size_mb, values))
    return found


def pair_samples(size_mb: int, notes: Sequence[Note]) -> list[Sample]:
    """The values of scripts/paired.py: s and %."""
    return [
        Sample(
            STEADY_SECTION,
            KEEPER,
            size_mb,
            {
                COST: 100 * (note.values["kept"] / note.values["plain"] - 1),
                PLAIN: note.values["plain"],
                KEPT: note.values["kept"],
                PLAIN_P95: note.values["plain_p95"],
                KEPT_P95: note.values["kept_p95"],
            },
        )
        for note in notes
        if note.way == "pair"
    ]


def _notes(script: str, env: Mapping[str, str]) -> list[Note]:
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        path = Path(folder, "costs.jsonl")
        with Job(ELAUNCH, WORKERS, (str(SCRIPTS / script),), env={**env, "BENCH_COSTS": str(path)}) as job:

            def ended() -> list[Note] | None:
                notes = read(path.read_text()) if path.exists() else []
                return notes if notes and notes[-1].way == "end" else None

            return job.wait_for(ended, "all was measured", _LIMIT_S)


def read(text: str) -> list[Note]:
    """The notes in JSON lines. A last line without its end is still being written. It is left out."""
    return [
        Note(fields["way"], fields["values"])
        for line in text.splitlines(keepends=True)
        if line.endswith("\n")
        for fields in [json.loads(line)]
    ]
