"""The cost of the Keeper while nothing fails: steps with it and without it, in turns."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import ELAUNCH
from bench.job import SCRIPTS, Job, Trouble
from bench.samples import Sample

SECTION = "state: steady cost"
SIZES_MB = (10, 100, 1000)
WORKERS = 2
COST, PLAIN, KEPT = "steady cost, %", "step without the Keeper, s", "step with it, s"
PLAIN_P95, KEPT_P95 = "p95 of a step without the Keeper, s", "p95 of a step with it, s"
_LIMIT_S = 2400.0


@dataclass(frozen=True)
class Note:
    """A line of the script: what it measured, a `pair` or its `end`."""

    way: str
    values: Mapping[str, float]


def pairs(size_mb: int, count: int) -> Iterator[Sample]:
    """One job of a state of `size_mb` MB (10^6 bytes): `count` pairs of stretches of training."""
    try:
        yield from pair_samples(size_mb, _notes(size_mb, count))
    except Trouble as trouble:
        yield Sample(SECTION, ELAUNCH.name, size_mb, why=str(trouble))


def pair_samples(size_mb: int, notes: Sequence[Note]) -> list[Sample]:
    """The values of scripts/paired.py: s and %."""
    return [
        Sample(
            SECTION,
            ELAUNCH.name,
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


def _notes(size_mb: int, count: int) -> list[Note]:
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        path = Path(folder, "costs.jsonl")
        env = {"BENCH_STATE_BYTES": str(size_mb * 10**6), "BENCH_SAMPLES": str(count), "BENCH_COSTS": str(path)}
        with Job(ELAUNCH, WORKERS, (str(SCRIPTS / "paired.py"),), env=env) as job:

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
