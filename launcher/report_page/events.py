"""A line of `timeline.jsonl` as a checked event (pure); docs/files.md has the events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elaunch.strict_json import parse_json

# The version of the events that this release knows, in the field `schema` of `started`.
SCHEMA_KNOWN = 1
# A text of an event is cut here: a traceback has at most 32 kB.
TEXT_MAX = 64 << 10
# The year 5138: a broken clock, whose sums would overflow.
_CLOCK_END_S = 1e11
# A year of seconds: later or earlier times than this around the first event are broken clocks.
_LONGEST_S = 366 * 86400.0


@dataclass(frozen=True)
class PastEvent:
    """One event of a run that is over, or goes on elsewhere.

    `at_s` is the wall clock (s since 1970), `monotonic_s` its host's CLOCK_MONOTONIC. The getters return a default for
    a field that is missing or has another type: the file may come from another release, or from anybody.
    """

    generation: int
    event: str
    at_s: float
    monotonic_s: float
    fields: Mapping[str, object]

    def number(self, name: str, default: int = -1) -> int:
        value = self.fields.get(name)
        return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else default

    def real(self, name: str, default: float = math.nan) -> float:
        return real(self.fields.get(name), default)

    def text(self, name: str) -> str:
        return text(self.fields.get(name))

    def record(self, name: str) -> Mapping[str, object]:
        value = self.fields.get(name)
        return value if isinstance(value, dict) else {}

    def numbers(self, name: str) -> tuple[int, ...]:
        value = self.fields.get(name)
        items = value if isinstance(value, list) else []
        return tuple(item for item in items if type(item) is int and abs(item) < 1 << 63)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.fields.get(name)
        return tuple(text(item) for item in value if isinstance(item, str)) if isinstance(value, list) else ()


@dataclass(frozen=True)
class ReadLines:
    """The events of one file, and how many of its lines are none.

    `is_torn`: the last line has no end. `is_cut`: the file is too long, and only its beginning was read.
    """

    events: tuple[PastEvent, ...]
    unreadable: int = 0
    is_torn: bool = False
    is_cut: bool = False


def real(value: object, default: float = math.nan) -> float:
    """A finite number, else the default."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    try:
        found = float(value)
    except OverflowError:
        return default
    return found if math.isfinite(found) else default


def text(value: object) -> str:
    """A text without lone surrogates, which UTF-8 cannot encode, cut to a bounded length; empty for anything else."""
    return value[:TEXT_MAX].encode(errors="backslashreplace").decode() if isinstance(value, str) else ""


def event_of(line: bytes) -> PastEvent | None:
    """The event in a line; None if there is none."""
    try:
        fields = parse_json(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    generation, event = fields.get("generation"), fields.get("event")
    at_s, monotonic_s = real(fields.get("at")), real(fields.get("monotonic_s"))
    if type(generation) is not int or not -1 <= generation < 1 << 31 or not isinstance(event, str):
        return None
    # The comparison is false for NaN too.
    if not (abs(at_s) < _CLOCK_END_S and abs(monotonic_s) < _CLOCK_END_S):
        return None
    return PastEvent(generation, text(event)[:100], at_s, monotonic_s, fields)


def read_lines(lines: Iterable[bytes]) -> ReadLines:
    """The events of a file's lines. A writer that was killed leaves half a line at the end."""
    events: list[PastEvent] = []
    unreadable = 0
    is_torn = False
    for line in lines:
        found = event_of(line)
        if found and (not events or abs(found.monotonic_s - events[0].monotonic_s) < _LONGEST_S):
            events.append(found)
        elif not line.endswith(b"\n"):
            is_torn = True
        elif line.strip():
            unreadable += 1
    return ReadLines(tuple(events), unreadable, is_torn)
