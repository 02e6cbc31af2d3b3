"""One node's `timeline.jsonl`: its checked events, and what they mean for each generation there (pure).

docs/files.md has the events. A file may be torn, from another release, or anybody's: what does not fit is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elaunch.strict_json import parse_json

TIMELINE = "timeline.jsonl"
# An event's text is truncated here: a traceback has at most 32 kB.
_TEXT_MAX = 64 << 10
# The year 5138: a broken clock, whose sums would overflow.
_CLOCK_END_S = 1e11
# A year of seconds: times further than this from the first event come from a broken clock.
_LONGEST_S = 366 * 86400.0
# A worker's mark is read later than this only by mistake.
_LATE_S = 5.0


@dataclass(frozen=True)
class PastEvent:
    """One event. `at_s` is the time on the wall clock (s since 1970), in a History the seconds of the job.

    Intervals between a node's events are of `monotonic_s`, a clock that is never set. The getters return a
    default for a field that is missing or has another type.
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

    def items(self, name: str) -> Sequence[object]:
        value = self.fields.get(name)
        return value if isinstance(value, list) else ()

    def numbers(self, name: str) -> list[int]:
        return [item for item in self.items(name) if type(item) is int and 0 <= item < 1 << 63]


@dataclass(frozen=True)
class Worker:
    """One worker's life. Times are seconds of the job, NaN where the log has none. `code` is None while it runs."""

    rank: int
    local_rank: int
    pid: int
    forked_s: float
    exited_s: float = math.nan
    code: int | None = None


@dataclass
class Visit:
    """One generation on one node. `times` has the first time of each event, `workers` are by local rank.

    `restoring_s` and `restored_s` are when the last worker got there, `stepped_s` when the first one had completed a
    step. Of the steps `first_step` … `last_step` (-1: none) the newest was seen at `seen_s`.
    """

    generation: int
    times: dict[str, float] = field(default_factory=dict)
    by_rank: dict[int, Worker] = field(default_factory=dict)
    kind: str = ""
    reason: str = ""
    world_size: int = 0
    quiet_s: float = 0.0
    restoring_s: float = math.nan
    restored_s: float = math.nan
    stepped_s: float = math.nan
    first_step: int = -1
    last_step: int = -1
    seen_s: float = math.nan

    @property
    def workers(self) -> list[Worker]:
        return [self.by_rank[local_rank] for local_rank in sorted(self.by_rank)]

    @property
    def first_step_began_s(self) -> float:
        """One step before the first worker had completed one, but not before it was forked; NaN without a step."""
        steps, took_s = self.last_step - self.first_step, self.seen_s - self.stepped_s
        step_s = took_s / steps if steps > 0 and took_s > 0 else math.inf
        began_s = known_or(latest(worker.forked_s for worker in self.by_rank.values()), self.times.get("sealed", 0.0))
        return max(self.stepped_s - step_s, began_s) if self.last_step >= 0 else math.nan

    def at(self, event: str) -> float:
        """When the event happened, NaN if it did not."""
        return self.times.get(event, math.nan)

    def add(self, event: PastEvent) -> None:
        """Apply the next event."""
        at_s = event.at_s
        self.times.setdefault(event.event, at_s)
        local_rank = event.number("local_rank")
        match event.event:
            case "opened":
                self.kind, self.reason = event.text("kind"), self.reason or event.text("cause")
            case "sealed":
                self.reason, self.world_size = event.text("reason") or self.reason, event.number("world_size", 0)
            case "hung":
                self.quiet_s = event.real("quiet_s", 0.0)
            case "forked" if local_rank >= 0:
                self.by_rank[local_rank] = Worker(event.number("rank"), local_rank, event.number("pid"), at_s)
            case "exited" if known := self.by_rank.get(local_rank):
                self.by_rank[local_rank] = replace(known, exited_s=at_s, code=event.number("code", 0))
            case "marked":
                # The agent reads a mark up to a second later, so the worker reports when.
                late_s = event.monotonic_s - event.real("said_s", event.monotonic_s)
                at_s -= min(max(late_s, 0.0), _LATE_S)
                match event.text("name"):
                    case "restoring":
                        self.restoring_s = latest((self.restoring_s, at_s))
                    case "restored":
                        self.restored_s = latest((self.restored_s, at_s))
                    case "stepped":
                        self.stepped_s = earliest((self.stepped_s, at_s))
            case "progress":
                first, newest = min(event.numbers("first_steps"), default=-1), max(event.numbers("steps"), default=-1)
                self.first_step = first if self.first_step < 0 else self.first_step
                if newest > self.last_step:
                    self.last_step, self.seen_s = newest, at_s
                    self.stepped_s = known_or(self.stepped_s, at_s)


@dataclass(frozen=True)
class NodeLog:
    """One agent's log, in its `folder`. `unreadable` counts lines that are not events.

    `name` is the host's, with a number if it had several agents. A log that was read alone has no `visits`.
    """

    folder: str
    events: tuple[PastEvent, ...]
    unreadable: int = 0
    name: str = ""
    visits: tuple[Visit, ...] = ()

    @property
    def started(self) -> PastEvent:
        """The event with the run's data; an empty one if the timeline lacks it."""
        return next((each for each in self.events if each.event == "started"), NO_EVENT)

    @property
    def host(self) -> str:
        return self.started.text("host") or "this node"

    @property
    def end_s(self) -> float:
        return max(event.at_s for event in self.events)

    def since(self, origin: float, name: str) -> NodeLog:
        """The log with `origin` (wall clock) as the job's second 0, and with its visits."""
        events = tuple(replace(event, at_s=event.at_s - origin) for event in self.events)
        visits: dict[int, Visit] = {}
        for event in events:
            if event.generation >= 0:
                visits.setdefault(event.generation, Visit(event.generation)).add(event)
        ordered = tuple(visits[number] for number in sorted(visits))
        return replace(self, events=events, name=name, visits=ordered)


NO_EVENT = PastEvent(-1, "", 0.0, 0.0, {})


def real(value: object, default: float = math.nan) -> float:
    """A finite number, else the default."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(found := float(value)):
                return found
    return default


def text(value: object) -> str:
    """A text without lone surrogates, which UTF-8 cannot encode, truncated; empty for anything else."""
    return value[:_TEXT_MAX].encode(errors="backslashreplace").decode() if isinstance(value, str) else ""


def earliest(times: Iterable[float]) -> float:
    """The first of the times that are known, NaN without any."""
    return min((at_s for at_s in times if not math.isnan(at_s)), default=math.nan)


def latest(times: Iterable[float]) -> float:
    """The last of the times that are known, NaN without any."""
    return max((at_s for at_s in times if not math.isnan(at_s)), default=math.nan)


def known_or(value: float, default: float) -> float:
    """`value`, or `default` where it is not known (NaN)."""
    return default if math.isnan(value) else value


def node_log(folder: str, lines: Iterable[bytes]) -> NodeLog:
    """The events in a timeline's lines. A writer that was killed leaves a torn last line."""
    events: list[PastEvent] = []
    unreadable = 0
    for line in lines:
        found = _event(line)
        first = events[0] if events else found
        if found and first and abs(since_s := found.monotonic_s - first.monotonic_s) < _LONGEST_S:
            events.append(replace(found, at_s=first.at_s + since_s))
        elif line.endswith(b"\n") and line.strip():
            unreadable += 1
    return NodeLog(folder, tuple(events), unreadable)


def _event(line: bytes) -> PastEvent | None:
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
