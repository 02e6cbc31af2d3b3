"""What one node's events say about each generation there (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.launcher.report_page.events import PastEvent, text

# Events after which a worker's end is no news: the agent has asked for it.
_ORDERS_TO_END = ("stopping", "killing", "told")

_MARKS_MAX = 100
# A worker's mark is older than this only by mistake.
_LATE_S = 5.0


@dataclass(frozen=True)
class Worker:
    """One worker's life. Times are seconds of the job; NaN where the log has none. `code` is None while it runs.

    `was_asked` says that its agent had told the workers to end before it ended.
    """

    rank: int
    local_rank: int
    pid: int
    forked_s: float
    exited_s: float = math.nan
    code: int | None = None
    was_asked: bool = False


@dataclass(frozen=True)
class StepsSeen:
    """The steps of a node's workers at a moment: the newest, and the first of the generation (-1 if not known)."""

    at_s: float
    step: int
    first_step: int = -1
    steps_per_s: float = math.nan


@dataclass(frozen=True)
class Visit:
    """One generation on one node. `times` has the first time of each event, `marks` the last of each mark's name.

    `stepped_s` is when the first worker's first step was complete, NaN if none said so.
    """

    generation: int
    times: Mapping[str, float]
    workers: tuple[Worker, ...]
    progress: tuple[StepsSeen, ...]
    marks: Mapping[str, float]
    kind: str = ""
    reason: str = ""
    world_size: int = 0
    quiet_s: float = math.nan
    stepped_s: float = math.nan
    is_spare: bool = False

    def at(self, event: str) -> float:
        """When the event happened, NaN if it did not."""
        return self.times.get(event, math.nan)


@dataclass(frozen=True)
class NodeLog:
    """One agent's log: the folder, who it was, and all its generations. Times are seconds of the job, but `began_at`.

    `end_s` is the time of the newest event. `name` is the host's, with a number if several agents were there at once.
    """

    folder: str
    host: str
    name: str
    run_id: str
    began_at: float
    events: tuple[tuple[float, PastEvent], ...]
    visits: tuple[Visit, ...]
    end_s: float

    @property
    def begin_s(self) -> float:
        return self.events[0][0] if self.events else 0.0


def node_log(
    folder: str, host: str, run_id: str, events: Sequence[PastEvent], origin: float, shift_s: float
) -> NodeLog:
    """The log of `events`, with `origin` (wall clock) as the job's second 0, and this host's clock moved by `shift_s`.

    Between events the monotonic clock counts, which nobody sets.
    """
    first = events[0]
    began = first.at_s + shift_s - origin
    timed = tuple((began + event.monotonic_s - first.monotonic_s, event) for event in events)
    numbers = sorted({event.generation for _, event in timed if event.generation >= 0})
    by_generation: dict[int, list[tuple[float, PastEvent]]] = {number: [] for number in numbers}
    for at_s, event in timed:
        if event.generation >= 0:
            by_generation[event.generation].append((at_s, event))
    visits = tuple(_visit(number, by_generation[number]) for number in numbers)
    return NodeLog(folder, host, host, run_id, first.at_s + shift_s, timed, visits, max(at_s for at_s, _ in timed))


def named(nodes: Sequence[NodeLog]) -> tuple[NodeLog, ...]:
    """The logs with their names. An agent that began after another one's end on its host has taken its place."""
    ends: dict[str, list[float]] = {}
    places: dict[str, tuple[str, int]] = {}
    for node in sorted(nodes, key=lambda node: node.begin_s):
        free = ends.setdefault(node.host, [])
        at = next((at for at, end_s in enumerate(free) if end_s <= node.begin_s), len(free))
        free[at : at + 1] = [node.end_s]
        places[node.folder] = (node.host, at)
    # In the order of the nodes, whose first has rank 0.
    order = list(dict.fromkeys(places[node.folder] for node in nodes))
    numbers = {place: 1 + [each for each in order if each[0] == place[0]].index(place) for place in order}
    return tuple(
        replace(node, name=f"{node.host} ({numbers[places[node.folder]]} of {len(ends[node.host])})")
        if len(ends[node.host]) > 1
        else node
        for node in nodes
    )


Homes = Mapping[tuple[str, int, int], NodeLog]


def homes_of(nodes: Sequence[NodeLog]) -> Homes:
    """The logs by host, generation and rank; (host, -1, -1) is the first of that host."""
    homes: dict[tuple[str, int, int], NodeLog] = {}
    for node in nodes:
        homes.setdefault((node.host, -1, -1), node)
        for visit in node.visits:
            for worker in visit.workers:
                homes.setdefault((node.host, visit.generation, worker.rank), node)
    return homes


def _visit(generation: int, events: Sequence[tuple[float, PastEvent]]) -> Visit:
    times: dict[str, float] = {}
    for at_s, event in events:
        times.setdefault(event.event, at_s)
    found = {event.event: event for _, event in reversed(events)}
    opened, sealed, hung = found.get("opened"), found.get("sealed"), found.get("hung")
    marked = _marked(events)
    return Visit(
        generation,
        times,
        _workers(events),
        tuple(_progress(at_s, event) for at_s, event in events if event.event == "progress"),
        _marks(marked),
        kind=opened.text("kind") if opened else "",
        reason=(sealed.text("reason") if sealed else "") or (opened.text("cause") if opened else ""),
        world_size=sealed.number("world_size", 0) if sealed else 0,
        quiet_s=hung.real("quiet_s") if hung else math.nan,
        stepped_s=min((at_s for name, at_s in marked if name == "stepped"), default=math.nan),
        is_spare="spare" in found and "sealed" not in found,
    )


def _marked(events: Sequence[tuple[float, PastEvent]]) -> list[tuple[str, float]]:
    """The marks of the workers. The agent reads a mark up to a second later, so the worker says when."""
    found: list[tuple[str, float]] = []
    for at_s, event in events:
        if event.event == "marked":
            late_s = event.monotonic_s - event.real("said_s", event.monotonic_s)
            found.append((event.text("name"), at_s - min(max(late_s, 0.0), _LATE_S)))
    return found


def _marks(marked: Sequence[tuple[str, float]]) -> dict[str, float]:
    """When the last worker came to each point."""
    marks: dict[str, float] = {}
    for name, at_s in marked:
        if name in marks or len(marks) < _MARKS_MAX:
            marks[name] = max(marks.get(name, 0.0), at_s)
    return marks


def _workers(events: Sequence[tuple[float, PastEvent]]) -> tuple[Worker, ...]:
    """Workers in the order of their local ranks. A worker that never ended, as far as the log says, has no code."""
    workers: dict[int, Worker] = {}
    is_ending = False
    for at_s, event in events:
        local_rank = event.number("local_rank")
        if event.event in _ORDERS_TO_END and text(event.fields.get("message")) != "ShowStacks":
            is_ending = True
        elif event.event == "forked" and local_rank >= 0:
            workers[local_rank] = Worker(event.number("rank"), local_rank, event.number("pid"), at_s)
        elif event.event == "exited" and local_rank in workers:
            known = workers[local_rank]
            code = event.number("code", 0)
            workers[local_rank] = Worker(
                known.rank, local_rank, known.pid, known.forked_s, at_s, code, was_asked=is_ending
            )
    return tuple(workers[local_rank] for local_rank in sorted(workers))


def _progress(at_s: float, event: PastEvent) -> StepsSeen:
    steps, first_steps = event.numbers("steps"), event.numbers("first_steps")
    begun = [step for step in first_steps if step >= 0]
    return StepsSeen(at_s, max(steps, default=-1), min(begun, default=-1), event.real("steps_per_s"))
