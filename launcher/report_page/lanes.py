"""The timeline's lanes: one for each worker's place, with what it did, and where it failed (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from elaunch.launcher.report_page.faults import Fault
from elaunch.launcher.report_page.goodput import Goodput, Stage
from elaunch.launcher.report_page.history import History, PastGeneration, known_or
from elaunch.launcher.report_page.node_log import NodeLog, Visit, Worker
from elaunch.launcher.report_page.warned import Warned
from elaunch.launcher.report_page.wording import count, duration, offset, signal_words

# With more workers than this on the page, a node has one lane for all of its workers, and one for each that failed.
_LANES_MAX = 24
# The page shows so many nodes at most, so many lanes of ranks that failed or were warned of, and about so many bars.
_NODES_MAX = 100
_MARKED_MAX = 100
_BARS_MAX = 5000
_BARS_OF_GENERATION = 5
_GENERATIONS_MIN = 5


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


class MarkKind(Enum):
    """What a mark stands for. The value is the name of its look in the page."""

    CAUSE = "cause"
    FOLLOWER = "follower"
    WARNING = "warning"


@dataclass(frozen=True)
class LaneMark:
    """A failure or a warning on a lane; `number` is its number among all of the job."""

    at_s: float
    kind: MarkKind
    number: int
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


@dataclass(frozen=True)
class Lanes:
    """The timeline of the page: the lanes in the order of the nodes and their local ranks, from `begin_s` on.

    It shows the newest `generations`. `nodes_left_out` and `ranks_left_out` (of those that failed) have no lane.
    """

    shown: tuple[Lane, ...]
    begin_s: float
    generations: int
    nodes_left_out: int
    ranks_left_out: int


def lanes_of(history: History, found: Goodput) -> Lanes:
    """The lanes that a page has room for."""
    history = _one_for_each_place(history)
    facts = lane_facts(history, found)
    ranks = {node.folder: _local_ranks(node) for node in history.nodes}
    is_by_rank = sum(map(len, ranks.values())) <= _LANES_MAX
    nodes = _shown_nodes(history, facts)
    marked = _marked_ranks(history, {node.folder for node in nodes})
    rows = sum(map(len, ranks.values())) if is_by_rank else len(nodes) + min(len(marked), _MARKED_MAX)
    generations = max(_BARS_MAX // (_BARS_OF_GENERATION * max(rows, 1)), _GENERATIONS_MIN)
    if len(history.generations) > generations:
        first = history.generations[-generations]
        facts = replace(facts, first=first.number, begin_s=known_or(first.opened_s, 0.0))
    shown: list[Lane] = []
    for node in nodes:
        if is_by_rank or len(ranks[node.folder]) < 2:
            shown += every_lane(facts, node)
        else:
            name = f"{node.name} · {len(ranks[node.folder])} ranks"
            shown.append(replace(_lane(facts, node, None, name, ()), is_node=True))
            mine = [rank for rank in ranks[node.folder] if (node.folder, rank) in marked[:_MARKED_MAX]]
            shown += _lanes_of_ranks(facts, node, mine)
    return Lanes(
        tuple(shown),
        facts.begin_s,
        min(generations, len(history.generations)),
        len(history.nodes) - len(nodes),
        0 if is_by_rank else max(len(marked) - _MARKED_MAX, 0),
    )


def _one_for_each_place(history: History) -> History:
    """With one log for each name: an agent that took the place of one that was killed has that one's lanes."""
    places: dict[str, NodeLog] = {}
    moved: dict[str, str] = {}
    for node in sorted(history.nodes, key=lambda node: node.begin_s):
        first = places.setdefault(node.name, node)
        moved[node.folder] = first.folder
        if first is not node:
            visits = (*(_closed(visit, node.begin_s) for visit in first.visits), *node.visits)
            places[node.name] = replace(first, visits=visits, end_s=node.end_s)
    if len(places) == len(history.nodes):
        return history
    return replace(
        history,
        nodes=tuple(places[name] for name in dict.fromkeys(node.name for node in history.nodes)),
        faults=tuple(replace(fault, folder=moved.get(fault.folder, "")) for fault in history.faults),
        warned=tuple(replace(warned, folder=moved.get(warned.folder, "")) for warned in history.warned),
    )


def _closed(visit: Visit, end_s: float) -> Visit:
    """The visit without workers that still run at `end_s`: their agent was killed."""
    workers = (replace(each, exited_s=known_or(each.exited_s, end_s)) for each in visit.workers)
    return replace(visit, workers=tuple(workers))


def _shown_nodes(history: History, facts: LaneFacts) -> list[NodeLog]:
    """The nodes that the page shows, in their order: those with a failure or a warning rather than the others."""
    if len(history.nodes) <= _NODES_MAX:
        return [*history.nodes]
    order = sorted(range(len(history.nodes)), key=lambda at: (history.nodes[at].folder not in facts.marks, at))
    return [history.nodes[at] for at in sorted(order[:_NODES_MAX])]


def _marked_ranks(history: History, folders: Set[str]) -> list[tuple[str, int]]:
    """The ranks of these folders that failed, or were warned of, as (folder, local rank); causes and warnings first."""
    faults = sorted(history.faults, key=lambda fault: not fault.is_cause)
    causes = sum(fault.is_cause for fault in faults)
    found: list[Fault | Warned] = [*faults[:causes], *history.warned, *faults[causes:]]
    return list(dict.fromkeys((each.folder, max(each.local_rank, 0)) for each in found if each.folder in folders))


@dataclass(frozen=True)
class LaneFacts:
    """What the lanes of all nodes need. The generations from `first` on are shown, from `begin_s` on.

    `lost_from_s` is when the first step that a generation lost began. `marks` has the failures and warnings by folder
    and local rank; -1 for those of no worker. `running` is the generation that runs now, up to `wall_s`; -1 for none.
    """

    generations: Mapping[int, PastGeneration]
    lost_from_s: Mapping[int, float]
    marks: Mapping[str, Mapping[int, Sequence[LaneMark]]]
    wall_s: float
    running: int
    first: int = 0
    begin_s: float = 0.0


def lane_facts(history: History, found: Goodput) -> LaneFacts:
    """The facts for lanes of all generations."""
    marks: dict[str, dict[int, list[LaneMark]]] = {}
    for number, fault in enumerate(history.faults):
        if fault.folder:
            kind = MarkKind.CAUSE if fault.is_cause else MarkKind.FOLLOWER
            mark = LaneMark(fault.at_s, kind, number, f"{offset(fault.at_s)}  {fault.sentence[:300]}")
            marks.setdefault(fault.folder, {}).setdefault(fault.local_rank, []).append(mark)
    for number, warned in enumerate(history.warned):
        if warned.folder and not warned.is_failure:
            note = f"{offset(warned.at_s)}  {warned.sentence[:300]}"
            mark = LaneMark(warned.at_s, MarkKind.WARNING, number, note)
            marks.setdefault(warned.folder, {}).setdefault(warned.local_rank, []).append(mark)
    generations = {generation.number: generation for generation in history.generations}
    losers = {generation.number for generation in history.generations if generation.steps_lost}
    lost = {p.generation: p.begin_s for p in found.parts if p.stage is Stage.LOST and p.generation in losers}
    running = history.last_that_ran if history.end.life.goes_on else -1
    return LaneFacts(generations, lost, marks, history.wall_s, running)


def every_lane(facts: LaneFacts, node: NodeLog) -> list[Lane]:
    """One lane for each local rank of a node, however many; for a node that never had a worker one without a rank."""
    ranks = _local_ranks(node)
    if not ranks:
        return [_lane(facts, node, [()] * len(node.visits), "no worker", facts.marks.get(node.folder, {}).get(-1, ()))]
    return _lanes_of_ranks(facts, node, ranks)


def _lanes_of_ranks(facts: LaneFacts, node: NodeLog, local_ranks: Sequence[int]) -> list[Lane]:
    marks = facts.marks.get(node.folder, {})
    by_rank: dict[int, list[Worker]] = {}
    for visit in node.visits:
        for worker in visit.workers:
            by_rank.setdefault(worker.local_rank, []).append(worker)
    seats = [{worker.local_rank: worker for worker in visit.workers} for visit in node.visits]
    first = min(by_rank)
    lanes = []
    for rank in local_ranks:
        # What no worker caused is shown with the first.
        mine = [*(marks.get(-1, ()) if rank == first else ()), *marks.get(rank, ())]
        workers = [[seat[rank]] if rank in seat else [] for seat in seats]
        lanes.append(_lane(facts, node, workers, _rank_name(rank, by_rank[rank]), mine))
    return lanes


def _local_ranks(node: NodeLog) -> list[int]:
    return sorted({worker.local_rank for visit in node.visits for worker in visit.workers})


def _rank_name(local_rank: int, workers: Sequence[Worker]) -> str:
    shown = list(dict.fromkeys(str(worker.rank) for worker in workers if worker.rank >= 0))
    if not shown:
        return f"local rank {local_rank}"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:3])}{', …' * (len(shown) > 3)}"


def _lane(
    facts: LaneFacts,
    node: NodeLog,
    workers: Sequence[Sequence[Worker]] | None,
    name: str,
    marks: Sequence[LaneMark],
) -> Lane:
    """The lane of these workers, one list for each visit; without them, of all the node's workers."""
    bars: list[Bar] = []
    free_s = 0.0 if node.visits and node.visits[0].generation == 0 else node.begin_s
    free_s = max(free_s, facts.begin_s)
    for at, visit in enumerate(node.visits):
        if visit.generation < facts.first:
            continue
        for bar in _bars(facts, node, visit, visit.workers if workers is None else workers[at], free_s):
            if bar.end_s > bar.begin_s:
                bars.append(bar)
                free_s = bar.end_s
    shown = tuple(mark for mark in marks if mark.at_s >= facts.begin_s)
    return Lane(node.name, node.folder, name, tuple(bars), shown)


def _bars(facts: LaneFacts, node: NodeLog, visit: Visit, workers: Sequence[Worker], free_s: float) -> Iterator[Bar]:
    number = visit.generation
    generation, lost_s = facts.generations[number], facts.lost_from_s.get(number, math.inf)
    if not workers:
        if visit.is_spare:
            until_s = known_or(visit.at("cleared"), facts.wall_s if number == facts.running else node.end_s)
            yield Bar(LaneStage.SPARE, free_s, until_s, number, f"generation {number}: a spare node, without workers")
        return
    forked_s = min(worker.forked_s for worker in workers)
    exits = [worker.exited_s for worker in workers if not math.isnan(worker.exited_s)]
    open_s = facts.wall_s if number == facts.running else node.end_s
    exited_s = max(exits) if len(exits) == len(workers) else open_s
    ends_s = min(known_or(generation.ends_s, exited_s), exited_s)
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
