"""What `profile.json` says of profiled steps: sentences, a table of the steps, who came last, one step drawn (pure).

The trainer writes the file (docs/files.md); its schema is the seam, since this room imports nothing of the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.launcher.report_page.events import real, text
from elaunch.strict_json import parse_json

# The version of the record that this release knows.
SCHEMA_KNOWN = 1
STEPS_MAX = 60
RANKS_MAX = 32
BARS_MAX = 300
_RANKS_KNOWN_MAX = 1 << 20
_SENTENCES_MAX = 8


@dataclass(frozen=True)
class ProfiledStepRow:
    """A step, as the mean over the ranks; `overlap` is NaN where nothing was sent."""

    step: int
    seconds: float
    computation_s: float
    communication_s: float
    exposed_s: float
    overlap: float


@dataclass(frozen=True)
class ProfileBar:
    """A collective of a rank: where it is drawn, as shares of the step, and what it was."""

    begin: float
    width: float
    note: str


@dataclass(frozen=True)
class ProfileLane:
    """One rank's collectives in the step that is drawn."""

    name: str
    bars: tuple[ProfileBar, ...]


@dataclass(frozen=True)
class LastRank:
    """How often a rank began a collective last, and by how much in all."""

    rank: int
    times: int
    late_s: float


@dataclass(frozen=True)
class ShownProfile:
    """One profile of a run. `drawn` is the step of the lanes, -1 if there is none."""

    generation: int
    first_step: int
    last_step: int
    sentences: tuple[str, ...]
    steps: tuple[ProfiledStepRow, ...]
    steps_left_out: int
    last: tuple[LastRank, ...]
    compared: int
    drawn: int
    drawn_s: float
    lanes: tuple[ProfileLane, ...]
    ranks_left_out: int
    mfu: float
    gpu_busy: float


def read_profile(content: bytes) -> ShownProfile | None:
    """The profile in the content of a file; None if it is none, or of a schema that this release does not know."""
    try:
        record = parse_json(content)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA_KNOWN:
        return None
    rows = [*_rows(record)]
    drawn = max(rows, key=lambda row: row.seconds, default=None)
    lanes = _lanes(record, drawn.step, drawn.seconds) if drawn and drawn.seconds > 0 else {}
    return ShownProfile(
        _whole(record.get("generation")),
        _whole(record.get("first_step")),
        _whole(record.get("last_step")),
        tuple(text(each)[:500] for each in _items(record, "sentences") if isinstance(each, str))[:_SENTENCES_MAX],
        tuple(rows[:STEPS_MAX]),
        max(len(rows) - STEPS_MAX, 0),
        tuple(
            LastRank(_whole(each.get("rank")), _whole(each.get("times")), real(each.get("late_s"), 0.0))
            for each in _records(record, "stragglers")
        )[:RANKS_MAX],
        max(_whole(record.get("collectives_compared")), 0),
        drawn.step if drawn and lanes else -1,
        drawn.seconds if drawn and lanes else math.nan,
        tuple(ProfileLane(f"rank {rank}", tuple(bars)) for rank, bars in sorted(lanes.items())[:RANKS_MAX]),
        max(len(lanes) - RANKS_MAX, 0),
        real(record.get("mfu")),
        real(record.get("gpu_busy")),
    )


def _rows(record: Mapping[str, Any]) -> Iterator[ProfiledStepRow]:
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for each in _records(record, "steps"):
        by_step.setdefault(_whole(each.get("step")), []).append(each)
    for step, shares in sorted(by_step.items()):
        names = ("seconds", "computation_s", "communication_s", "exposed_s")
        seconds, computes, sends, exposed = (_mean(real(each.get(name), 0.0) for each in shares) for name in names)
        yield ProfiledStepRow(step, seconds, computes, sends, exposed, 1 - exposed / sends if sends > 0 else math.nan)


def _lanes(record: Mapping[str, Any], step: int, seconds: float) -> dict[int, list[ProfileBar]]:
    """The collectives of one step, by rank."""
    lanes: dict[int, list[ProfileBar]] = {}
    for each in _records(record, "buckets"):
        if _whole(each.get("step")) != step:
            continue
        begins, lengths = each.get("begins_s"), each.get("lengths_s")
        if not isinstance(begins, dict) or not isinstance(lengths, dict):
            continue
        kind, size = text(each.get("kind"))[:40], max(_whole(each.get("bytes")), 0)
        for name, begin in begins.items():
            begin_s, length_s = real(begin), max(real(lengths.get(name), 0.0), 0.0)
            rank = int(name) if name.isascii() and name.isdigit() and len(name) < 7 else _RANKS_KNOWN_MAX
            if rank >= _RANKS_KNOWN_MAX or math.isnan(begin_s):
                continue
            bars = lanes.setdefault(rank, [])
            # A step of one rank may begin before rank 0's.
            first, last = max(begin_s, 0.0), min(begin_s + length_s, seconds)
            if last > first and len(bars) < BARS_MAX:
                note = f"{kind} of {_size(size)}: {length_s * 1e3:.2f} ms, from {begin_s * 1e3:.2f} ms on"
                bars.append(ProfileBar(first / seconds, (last - first) / seconds, note))
    return lanes


def _size(count: int) -> str:
    if count >= 1_000_000:
        return f"{count / 1e6:,.1f} MB"
    return f"{count / 1e3:.1f} kB" if count >= 1000 else f"{count} bytes"


def _items(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def _records(record: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    return (each for each in _items(record, name) if isinstance(each, dict))


def _whole(value: object) -> int:
    return value if type(value) is int and -1 <= value < 1 << 53 else -1


def _mean(values: Iterable[float]) -> float:
    found = [*values]
    return sum(each / len(found) for each in found)
