"""How the job ended, or whether it runs (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elaunch.launcher.report_page.events import PastEvent
from elaunch.launcher.report_page.node_log import NodeLog

# Clocks of two hosts that differ by less are taken as they are: a table reaches all nodes within a second or so.
SKEW_S = 2.0
# The end that the most informed node tells. The first two are of the whole job, the others may be of a node that left.
_OUTCOMES = ("failed", "succeeded", "interrupted", "refused", "unknown")
# The end of a job whose last agent has died: the event of that one's guardian, and the outcome.
DIED, KILLED = "agent_died", "killed"
_OF_THE_JOB = 2
# A job whose newest event is younger seems to run. One that reports steps has an event at least every 10 s.
_FRESH_S = 60.0


@dataclass(frozen=True)
class Look:
    """What the reader's host shows of a job whose log has no end: the wall clock, and the agents that answer there.

    `agents` are their jobs' names and their pids. `host` is that host's name, empty if an agent of the job would not
    answer the reader.
    """

    at: float
    host: str
    agents: frozenset[tuple[str, int]]


class Life(Enum):
    """Whether the job runs. The value is its name in `--json`."""

    ENDED = "ended"
    RUNS = "running"  # An agent of it answers.
    SEEMS_TO_RUN = "seems to run"  # Its log was written to a moment ago.
    UNKNOWN = "unknown"

    @property
    def goes_on(self) -> bool:
        return self in (Life.RUNS, Life.SEEMS_TO_RUN)


@dataclass(frozen=True)
class End:
    """How the job ended, as its nodes say, at `at_s`. `outcome` is empty if none of them says so.

    A job that goes on is shown up to `at_s`, the time of the look. `silent_s` is the age of its newest event then, NaN
    if nobody looked.
    """

    outcome: str
    code: int
    reason: str
    restarts: int
    max_restarts: int
    at_s: float
    life: Life = Life.ENDED
    silent_s: float = math.nan


def end_of(nodes: Sequence[NodeLog]) -> End:
    """The end that the nodes tell; without one, the time of the newest event."""
    told = [(at_s, event) for node in nodes for at_s, event in node.events if event.event == "ended"]
    last_s = max(node.end_s for node in nodes)
    ranked = sorted(told, key=lambda each: _rank_of(each[1].text("outcome")))
    best = _rank_of(ranked[0][1].text("outcome")) if ranked else len(_OUTCOMES)
    others_s = max((node.end_s for node in nodes if not _has_ended(node)), default=-math.inf)
    went_on = best >= _OF_THE_JOB and others_s > max((at_s for at_s, _ in told), default=last_s) + SKEW_S
    if not ranked or went_on or (best == len(_OUTCOMES) - 1 and others_s > -math.inf):
        died = [(at_s, event.text("reason")) for node in nodes for at_s, event in node.events if event.event == DIED]
        if died and max(died)[0] > others_s - SKEW_S and len(nodes) >= _seats(nodes):
            return End(KILLED, -1, max(died)[1], _restarts(nodes, None), _max_restarts(nodes, None), last_s)
        return End("", -1, "", _restarts(nodes, None), _max_restarts(nodes, None), last_s, Life.UNKNOWN)
    _, event = ranked[0]
    return End(
        event.text("outcome") or "unknown",
        event.number("code"),
        event.text("reason"),
        _restarts(nodes, event),
        _max_restarts(nodes, event),
        last_s,
    )


def _seats(nodes: Sequence[NodeLog]) -> int:
    """How many nodes the newest table has: the logs of some may be on other disks."""
    tables = [
        (at_s, event.fields.get("nodes")) for node in nodes for at_s, event in node.events if event.event == "sealed"
    ]
    newest = max(tables, key=lambda each: each[0], default=(0.0, None))[1]
    return len(newest) if isinstance(newest, list) else 1


def _has_ended(node: NodeLog) -> bool:
    return any(event.event == "ended" for _, event in node.events)


def seen(end: End, nodes: Sequence[NodeLog], nows_s: Sequence[float], look: Look) -> End:
    """The end with what `look` shows: does the job run? `nows_s` is the time of the look, on each node's clock."""
    left = [(node, now_s) for node, now_s in zip(nodes, nows_s, strict=True) if not _has_ended(node)]
    answering = [(node, now_s) for node, now_s in left if node.host == look.host and _agent(node) in look.agents]
    if not left or (end.outcome and not answering) or end.outcome in _OUTCOMES[:_OF_THE_JOB]:
        return end
    newest, now_s = max(answering or left, key=lambda each: each[0].end_s)
    silent_s = max(now_s - newest.end_s, 0.0)
    # No agent answers where all of them ran.
    is_gone = not answering and all(node.host == look.host for node, _ in left)
    is_fresh = silent_s < _FRESH_S and not is_gone
    life = Life.RUNS if answering else Life.SEEMS_TO_RUN if is_fresh else Life.UNKNOWN
    at_s = max(end.at_s, now_s) if life.goes_on else end.at_s
    return replace(end, outcome="", code=-1, reason="", at_s=at_s, life=life, silent_s=silent_s)


def _agent(node: NodeLog) -> tuple[str, int]:
    """The job's name and the agent's pid."""
    started = next((event for _, event in node.events if event.event == "started"), None)
    return (started.text("run_id"), started.number("pid")) if started else ("", -1)


def _rank_of(outcome: str) -> int:
    return _OUTCOMES.index(outcome) if outcome in _OUTCOMES else len(_OUTCOMES) - 1


def _restarts(nodes: Sequence[NodeLog], ended: PastEvent | None) -> int:
    """Restarts after failures: as the end says, else as the newest table says, else the generations opened for one."""
    known = [ended.number("restarts")] if ended else []
    known += [event.number("restarts") for node in nodes for _, event in node.events if event.event == "sealed"]
    if max(known, default=-1) >= 0:
        return max(known)
    opened = {visit.generation for node in nodes for visit in node.visits if visit.kind in ("fail", "loss")}
    return len(opened)


def _max_restarts(nodes: Sequence[NodeLog], ended: PastEvent | None) -> int:
    known = [ended.number("max_restarts")] if ended else []
    known += [event.number("max_restarts") for node in nodes for _, event in node.events if event.event == "started"]
    return max(known, default=-1)
