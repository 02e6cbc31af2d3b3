"""The timeline's lanes: one for each worker's place, with what it did, and where it failed (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from elaunch.launcher.report_page.faults import Fault
from elaunch.launcher.report_page.goodput import Goodput, Stage
from elaunch.launcher.report_page.history import History, PastGeneration
from elaunch.launcher.report_page.node_log import NodeLog, Visit, Worker
from elaunch.launcher.report_page.wording import count, duration, offset, signal_words
from elaunch.records import dataclass

# With more workers than this on the page, a node has one lane for all of its workers, and one for each that failed.
_LANES_MAX = 24
# A lane shows this many generations, the newest.
_GENERATIONS_MAX = 1000


class LaneStage(Enum):
    """What a worker's place did. The value is the name of its colour in the page."""

    WAITS = "waits"
    STARTS = "starts"
    TRAINS = "trains"
    LOSES = "loses"
    RUNS = "runs"
    ENDS = "ends"
    SPARE = "spare"

    @property
    def words(self) -> str:
        """As the legend says it."""
        return _WORDS[self]


_WORDS = {
    LaneStage.WAITS: "waits for its start",
    LaneStage.STARTS: "starts and restores",
    LaneStage.TRAINS: "trains",
    LaneStage.LOSES: "steps that were lost",
    LaneStage.RUNS: "runs (reports no steps)",
    LaneStage.ENDS: "saves and ends",
    LaneStage.SPARE: "spare",
}


@dataclass(frozen=True)
class Bar:
    """A stretch of a lane."""

    doing: LaneStage
    begin_s: float
    end_s: float
    generation: int
    note: str


@dataclass(frozen=True)
class LaneMark:
    """A failure on a lane; `fault` is its number on the page."""

    at_s: float
    fault: int
    is_cause: bool
    note: str


@dataclass(frozen=True)
class Lane:
    """One row of the timeline. `is_node`: it stands for all workers of its node, and has the host's name."""

    host: str
    folder: str
    name: str
    bars: tuple[Bar, ...]
    marks: tuple[LaneMark, ...]
    is_node: bool = False


def lanes_of(history: History, found: Goodput) -> tuple[Lane, ...]:
    """The lanes in the order of the nodes and their local ranks."""
    generations = {generation.number: generation for generation in history.generations}
    places = sum(len(_local_ranks(node)) for node in history.nodes)
    shown: list[Lane] = []
    lost = _lost_from(history, found)
    for node in history.nodes:
        lanes = every_lane(history, found, node)
        if places > _LANES_MAX and len(lanes) > 1:
            failed = [lane for lane in lanes if lane.marks]
            name = f"{node.host} · {len(lanes)} ranks"
            whole = _lane(node, generations, lost, _local_ranks(node), name, ())
            lanes = [replace(whole, is_node=True), *failed[:_LANES_MAX]]
        shown += lanes
    return tuple(shown)


def every_lane(history: History, found: Goodput, node: NodeLog) -> list[Lane]:
    """One lane for each local rank of a node, however many; for a node that never had a worker one without a rank."""
    generations = {generation.number: generation for generation in history.generations}
    lost = _lost_from(history, found)
    marks = _marks(node, history.faults)
    ranks = _local_ranks(node)
    if not ranks:
        return [_lane(node, generations, lost, [], "no worker", marks.get(-1, ()))]
    # What no worker caused is shown with the first.
    marks[ranks[0]] = (*marks.get(-1, ()), *marks.get(ranks[0], ()))
    return [_lane(node, generations, lost, [rank], _rank_name(node, rank), marks.get(rank, ())) for rank in ranks]


def _lost_from(history: History, found: Goodput) -> dict[int, float]:
    """When the first step that a generation lost began, for those that lost whole steps."""
    losers = {generation.number for generation in history.generations if generation.steps_lost}
    parts = [part for part in found.parts if part.stage is Stage.LOST and part.generation in losers]
    return {part.generation: part.begin_s for part in parts}


def _local_ranks(node: NodeLog) -> list[int]:
    return sorted({worker.local_rank for visit in node.visits for worker in visit.workers})


def _rank_name(node: NodeLog, local_rank: int) -> str:
    ranks = {w.rank: None for visit in node.visits for w in visit.workers if w.local_rank == local_rank}
    shown = [str(rank) for rank in ranks if rank >= 0]
    if not shown:
        return f"local rank {local_rank}"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:3])}{', …' * (len(shown) > 3)}"


def _marks(node: NodeLog, faults: Sequence[Fault]) -> dict[int, tuple[LaneMark, ...]]:
    """The node's failures by local rank; -1 for those of no worker."""
    marks: dict[int, tuple[LaneMark, ...]] = {}
    for number, fault in enumerate(faults):
        if fault.folder == node.folder:
            mark = LaneMark(fault.at_s, number, fault.is_cause, f"{offset(fault.at_s)}  {fault.sentence[:300]}")
            marks[fault.local_rank] = (*marks.get(fault.local_rank, ()), mark)
    return marks


def _lane(
    node: NodeLog,
    generations: Mapping[int, PastGeneration],
    lost: Mapping[int, float],
    local_ranks: Sequence[int],
    name: str,
    marks: tuple[LaneMark, ...],
) -> Lane:
    bars: list[Bar] = []
    free_s = 0.0 if node.visits and node.visits[0].generation == 0 else _begin_s(node)
    for visit in node.visits[-_GENERATIONS_MAX:]:
        generation = generations[visit.generation]
        workers = [worker for worker in visit.workers if worker.local_rank in local_ranks]
        for bar in _bars(node, visit, generation, workers, free_s, lost.get(visit.generation, math.inf)):
            if bar.end_s > bar.begin_s:
                bars.append(bar)
                free_s = bar.end_s
    return Lane(node.host, node.folder, name, tuple(bars), marks)


def _begin_s(node: NodeLog) -> float:
    return node.events[0][0] if node.events else 0.0


def _bars(
    node: NodeLog, visit: Visit, generation: PastGeneration, workers: Sequence[Worker], free_s: float, lost_s: float
) -> Iterator[Bar]:
    number = visit.generation
    if not workers:
        if visit.is_spare:
            until_s = _or(visit.at("cleared"), node.end_s)
            yield Bar(LaneStage.SPARE, free_s, until_s, number, f"generation {number}: a spare node, without workers")
        return
    forked_s = min(worker.forked_s for worker in workers)
    exits = [worker.exited_s for worker in workers if not math.isnan(worker.exited_s)]
    exited_s = max(exits) if len(exits) == len(workers) else node.end_s
    ends_s = min(_or(generation.ends_s, exited_s), exited_s)
    what = f"generation {number}, {_who(workers)}"
    yield Bar(LaneStage.WAITS, free_s, forked_s, number, f"{what}: waits for its start ({duration(forked_s - free_s)})")
    if math.isnan(generation.trains_s):
        doing, begun_s, words = LaneStage.RUNS, forked_s, "runs"
    else:
        doing, begun_s, words = LaneStage.TRAINS, min(max(generation.trains_s, forked_s), ends_s), _steps(generation)
        yield Bar(LaneStage.STARTS, forked_s, begun_s, number, f"{what}: starts ({duration(begun_s - forked_s)})")
    ends_s = max(ends_s, begun_s)
    kept_s = min(max(lost_s, begun_s), ends_s)
    yield Bar(doing, begun_s, kept_s, number, f"{what}: {words} ({duration(ends_s - begun_s)})")
    lost = f"{count(generation.steps_lost, 'step')} lost, done again later"
    yield Bar(LaneStage.LOSES, kept_s, ends_s, number, f"{what}: {lost} ({duration(ends_s - kept_s)})")
    how = _how(workers)
    yield Bar(LaneStage.ENDS, ends_s, exited_s, number, f"{what}: {how} ({duration(exited_s - ends_s)})")


def _who(workers: Sequence[Worker]) -> str:
    if len(workers) == 1:
        return f"rank {workers[0].rank}, pid {workers[0].pid}"
    return f"ranks {workers[0].rank} to {workers[-1].rank}"


def _steps(generation: PastGeneration) -> str:
    lost = f", of which {count(generation.steps_lost, 'step')} lost" if generation.steps_lost else ""
    return f"trains steps {generation.first_step:,} to {generation.last_step:,}{lost}"


def _how(workers: Sequence[Worker]) -> str:
    codes = {worker.code for worker in workers}
    if len(codes) > 1:
        return "ends"
    code = codes.pop()
    if code is None:
        return "its end is not in the log"
    return f"ended by {signal_words(-code)}" if code < 0 else f"ends with exit code {code}"


def _or(value: float, default: float) -> float:
    return default if math.isnan(value) else value
