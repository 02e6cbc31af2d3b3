"""The history of a job, from the logs of its nodes: generations, failures, warnings, its end, and its goodput (pure).

Each moment of the job is in exactly one stage. ETTR is the effective training time ratio: productive training time /
wall time (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
arXiv:2410.21680). Steps that a failure lost are not productive, although workers were busy with them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elaunch.launcher.inspect.node_log import NO_EVENT, NodeLog, PastEvent, Visit, Worker, earliest, known_or, latest

# A failure that is recorded later than this after it happened has another host's clock, or a wrong one.
_LATE_S = 3600.0
# Kinds of failures that another failure explains.
_SECONDARY = ("peer lost", "ended early")
# If nodes differ, the first of these counts. Two are of the whole job, the others may be of a node that left.
_OUTCOMES = ("failed", "succeeded", "interrupted", "refused")
_OF_THE_JOB = _OUTCOMES[:2]
# The outcome of a job whose last agent was killed, as its guardian recorded.
KILLED = "killed"


@dataclass(frozen=True)
class End:
    """How the job ended at `at_s`. `outcome` is empty if no node recorded it: the newest event is at `at_s` then."""

    at_s: float
    outcome: str = ""
    code: int = -1
    reason: str = ""
    restarts: int = 0
    max_restarts: int = -1


@dataclass(frozen=True)
class Incident:
    """A failure, or a warning: a hang that did not become a failure, or a slow rank. `rank` is -1 if none is named.

    `folder` is the log folder of the rank's node. `is_cause`: the generation ended because of this failure. A hang that
    was warned of ended at `until_s`, NaN without such an event.
    """

    kind: str
    generation: int
    at_s: float
    host: str
    rank: int
    local_rank: int
    folder: str
    sentence: str
    pid: int = -1
    advice: str = ""
    exception: str = ""
    traceback: str = ""
    log_path: str = ""
    is_cause: bool = False
    is_warning: bool = False
    until_s: float = math.nan


@dataclass(frozen=True)
class PastGeneration:
    """One generation of the job. Times are NaN if not known.

    `opened_s` … `ready_s` are the stages of its start, up to where its workers restore the state; `trains_s` is when
    its first step began, `ends_s` when the training stopped, `noted_s` when an agent detected it, `cleared_s` when all
    its processes had exited. Of its steps `first_step` … `last_step` (-1: none) all up to `kept_step` count; later
    generations repeated the others.
    """

    generation: int
    kind: str
    reason: str
    world_size: int
    hosts: int
    opened_s: float
    sealed_s: float
    forked_s: float
    ready_s: float
    trains_s: float
    ends_s: float
    noted_s: float
    cleared_s: float
    first_step: int
    last_step: int
    kept_step: int

    @property
    def has_run(self) -> bool:
        """Whether it had workers. The end of a job may open a generation that never runs."""
        return self.world_size > 0

    @property
    def steps_lost(self) -> int:
        return self.last_step - self.kept_step if self.last_step >= 0 else 0


@dataclass(frozen=True)
class History:
    """The whole job. `began_at` is second 0 on the wall clock; `remarks` are caveats about the data."""

    run_id: str
    command: str
    version: str
    began_at: float
    utc_offset_s: int
    nodes: tuple[NodeLog, ...]
    generations: tuple[PastGeneration, ...]
    faults: tuple[Incident, ...]
    warned: tuple[Incident, ...]
    end: End
    remarks: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        return self.end.at_s

    @property
    def knows_steps(self) -> bool:
        """Whether some generation reported steps."""
        return any(generation.last_step >= 0 for generation in self.generations)

    @property
    def steps_lost(self) -> int:
        """Steps that were done again, -1 if no step is known."""
        return sum(generation.steps_lost for generation in self.generations) if self.knows_steps else -1


def history(logs: Sequence[NodeLog]) -> History:
    """The history in these logs of one job; at least one has an event."""
    logs = sorted((log for log in logs if log.events), key=lambda log: (_first_rank(log), log.events[0].at_s))
    origin = min(log.events[0].at_s for log in logs)
    nodes = _named(logs, origin)
    faults = _faults(nodes, origin)
    end = _end(nodes)
    started = logs[0].started
    offset_s = started.number("utc_offset_s", 0)
    return History(
        run_id=started.text("run_id"),
        command=started.text("command"),
        version=started.text("version"),
        began_at=origin,
        utc_offset_s=offset_s if abs(offset_s) <= 14 * 3600 else 0,
        nodes=nodes,
        generations=_generations(nodes, faults),
        faults=faults,
        warned=tuple(sorted([*_hangs(nodes, faults), *_slow_ranks(nodes)], key=lambda warned: warned.at_s)),
        end=end,
        remarks=tuple(_remarks(nodes, end)),
    )


def _first_rank(log: NodeLog) -> int:
    """The node's first rank: the node of rank 0 comes first."""
    ranks = (event.number("rank") for event in log.events if event.event == "forked")
    return next((rank for rank in ranks if rank >= 0), 1 << 62)


def _named(logs: Sequence[NodeLog], origin: float) -> tuple[NodeLog, ...]:
    """The logs as parts of the job, with their names: agents of one host are numbered."""
    of_host = Counter(log.host for log in logs)
    numbers = Counter[str]()
    named = []
    for log in logs:
        numbers[log.host] += 1
        number = f" ({numbers[log.host]} of {of_host[log.host]})" if of_host[log.host] > 1 else ""
        named.append(log.since(origin, f"{log.host}{number}"))
    return tuple(named)


def _home(nodes: Sequence[NodeLog], host: str, generation: int, rank: int) -> tuple[str, int]:
    """The log folder and the local rank of a rank; the first log of its host and -1 if no log has it."""
    of_host = [node for node in nodes if node.host == host]
    for node in of_host:
        workers = (worker for visit in node.visits if visit.generation == generation for worker in visit.workers)
        if found := next((worker for worker in workers if worker.rank == rank), None):
            return node.folder, found.local_rank
    return (of_host[0].folder if of_host else "", -1)


def _events(nodes: Sequence[NodeLog], *names: str) -> list[tuple[NodeLog, PastEvent]]:
    found = [(node, event) for node in nodes for event in node.events if event.event in names]
    return sorted(found, key=lambda each: each[1].at_s)


def _faults(nodes: Sequence[NodeLog], origin: float) -> tuple[Incident, ...]:
    """All failures by generation: its cause first, then the others by time. Newer records complete older ones."""
    numbers = sorted({visit.generation for node in nodes for visit in node.visits if visit.workers})
    found: dict[tuple[int, str, int, int], Incident] = {}
    for node, event in _events(nodes, "failed", "cause", "restarting", "gave_up"):
        record, generation, is_verdict = event, event.generation, event.event in ("restarting", "gave_up")
        if is_verdict:
            record = replace(event, fields=event.record("failure"))
        if not record.fields:
            continue
        # `gave_up` carries the number of the failed generation itself.
        if event.event == "restarting" and (before := bisect_left(numbers, generation)):
            generation = numbers[before - 1]
        host, rank, pid = record.text("host") or node.host, record.number("rank"), record.number("pid")
        folder, _ = _home(nodes, host, generation, rank)
        # `failed_at` is the wall clock of the failed worker's host; the event cannot be earlier than the failure.
        failed_s = record.real("failed_at") - origin
        is_timed = folder == node.folder and 0 < event.at_s - failed_s < _LATE_S
        key = (generation, host, rank, pid)
        known = found.get(key)
        found[key] = Incident(
            record.text("kind"),
            generation,
            known.at_s if known else failed_s if is_timed else event.at_s,
            host,
            rank,
            record.number("local_rank"),
            folder,
            record.text("sentence") or record.text("message"),
            pid,
            record.text("advice") or (known.advice if known else ""),
            record.text("exception"),
            record.text("traceback") or (known.traceback if known else ""),
            record.text("log_path") or (known.log_path if known else ""),
            is_verdict or (known is not None and known.is_cause),
        )
    by_generation: dict[int, list[Incident]] = {}
    for fault in found.values():
        by_generation.setdefault(fault.generation, []).append(fault)
    ordered: list[Incident] = []
    for _, faults in sorted(by_generation.items()):
        # If no verdict names the cause, it is the earliest that no other failure explains.
        faults.sort(key=lambda fault: (not fault.is_cause, fault.kind in _SECONDARY, fault.at_s))
        ordered += [replace(fault, is_cause=fault is faults[0]) for fault in faults]
    return tuple(ordered)


def _hangs(nodes: Sequence[NodeLog], faults: Sequence[Incident]) -> Iterator[Incident]:
    """The hangs that did not become failures, each once, although each node reports it."""
    failed = {fault.generation for fault in faults if fault.kind == "hang"}
    open_: dict[int, Incident] = {}
    for _, event in _events(nodes, "seems_hung", "goes_on"):
        known, generation = open_.pop(event.generation, None), event.generation
        if event.event == "goes_on":
            if known:
                yield replace(known, until_s=event.at_s)
        elif known:
            open_[generation] = known
        else:
            rank, message, host = event.number("rank"), event.text("message"), event.text("host")
            folder, local_rank = _home(nodes, host, generation, rank)
            who = f"rank {rank} on {host} {message.removeprefix('it ')}" if rank >= 0 else message
            sentence, place = f"the job seemed to hang: {who}", (host, rank, local_rank, folder)
            open_[generation] = Incident("hang", generation, event.at_s, *place, sentence, is_warning=True)
    yield from (warned for generation, warned in open_.items() if generation not in failed)


def _slow_ranks(nodes: Sequence[NodeLog]) -> Iterator[Incident]:
    for node, event in _events(nodes, "slow"):
        rank, generation = event.number("rank"), event.generation
        text = event.text("text") or f"rank {rank} was slower than the other ranks of {node.host}"
        place = (node.host, rank, _home(nodes, node.host, generation, rank)[1], node.folder)
        yield Incident("slow rank", generation, event.at_s, *place, text, is_warning=True)


def _end(nodes: Sequence[NodeLog]) -> End:
    """The end that the nodes recorded; that of a node that left counts only if no other one continued."""
    last_s = max(node.end_s for node in nodes)
    recorded = _events(nodes, "ended")
    # The earliest event of each outcome.
    outcomes = {event.text("outcome"): event for _, event in reversed(recorded)}
    ended = next((outcomes[each] for each in (*_OUTCOMES, *outcomes) if each in outcomes), NO_EVENT)
    sealed, started = ([event for _, event in _events(nodes, name)] for name in ("sealed", "started"))
    end = End(
        last_s,
        restarts=max(0, *(event.number("restarts") for event in (ended, *sealed))),
        max_restarts=max(event.number("max_restarts") for event in (ended, *started)),
    )
    if recorded and (ended.text("outcome") in _OF_THE_JOB or len({node.folder for node, _ in recorded}) == len(nodes)):
        return replace(end, outcome=ended.text("outcome"), code=ended.number("code"), reason=ended.text("reason"))
    died = [event for _, event in _events(nodes, "agent_died")]
    # The newest table has the number of nodes: the logs of some may be on other disks.
    seats = len(sealed[-1].items("nodes")) if sealed else 1
    if died and died[-1].at_s == last_s and len(nodes) >= seats:
        return replace(end, outcome=KILLED, reason=died[-1].text("reason"))
    return end


def _generations(nodes: Sequence[NodeLog], faults: Sequence[Incident]) -> tuple[PastGeneration, ...]:
    visits: dict[int, list[Visit]] = {}
    for node in nodes:
        for visit in node.visits:
            visits.setdefault(visit.generation, []).append(visit)
    causes = {fault.generation: fault for fault in faults if fault.is_cause}
    found: list[PastGeneration] = []
    next_opened_s, next_first = math.nan, 1 << 62
    # From the last to the first: steps from a later one's first step on were repeated.
    for number in sorted(visits, reverse=True):
        generation = _generation(number, visits[number], causes.get(number), next_opened_s)
        kept = max(min(generation.last_step, next_first - 1), generation.first_step - 1)
        found.append(replace(generation, kept_step=kept))
        next_opened_s = generation.opened_s
        next_first = min(next_first, generation.first_step) if generation.first_step >= 0 else next_first
    return tuple(found[::-1])


def _generation(number: int, visits: Sequence[Visit], cause: Incident | None, next_opened_s: float) -> PastGeneration:
    seated = [visit for visit in visits if visit.workers] or list(visits)
    workers: list[Worker] = [worker for visit in seated for worker in visit.workers]
    noted_s = earliest([next_opened_s, *(visit.at("failed") for visit in seated)])
    noted_s = known_or(noted_s, cause.at_s if cause else math.nan)
    ends = [*(visit.at("signalled") for visit in seated), *(worker.exited_s for worker in workers)]
    noted_s = known_or(noted_s, earliest(ends))
    # A hang began when its ranks reported for the last time.
    quiet_s = max(visit.quiet_s for visit in visits) if cause and cause.kind == "hang" else 0.0
    last_step = max(visit.last_step for visit in seated)
    trains_s = latest(visit.restored_s for visit in seated)
    trains_s = known_or(trains_s, earliest(visit.first_step_began_s for visit in seated))
    return PastGeneration(
        number,
        kind=next((visit.kind for visit in visits if visit.kind), ""),
        reason=next((visit.reason for visit in seated if visit.reason), ""),
        world_size=max(visit.world_size for visit in visits) or len(workers),
        hosts=sum(bool(visit.workers) for visit in visits),
        opened_s=earliest(visit.at("opened") for visit in visits),
        sealed_s=latest(visit.at("sealed") for visit in seated),
        forked_s=latest(worker.forked_s for worker in workers),
        ready_s=latest(visit.restoring_s for visit in seated),
        trains_s=trains_s if last_step >= 0 else math.nan,
        ends_s=earliest([noted_s, cause.at_s - quiet_s if cause else math.nan]),
        noted_s=noted_s,
        cleared_s=latest([*(visit.at("cleared") for visit in seated), *(visit.at("stopped") for visit in seated)]),
        first_step=min((visit.first_step for visit in seated if visit.first_step >= 0), default=-1),
        last_step=last_step,
        kept_step=last_step,
    )


def _remarks(nodes: Sequence[NodeLog], end: End) -> Iterator[str]:
    for node in nodes:
        if node.unreadable:
            yield f"{node.unreadable} lines of {node.host}'s timeline cannot be read and are left out"
        yield from (event.text("reason") for event in node.events if event.event == "agent_died")
    if not end.outcome:
        yield (
            "No node recorded how the job ended: it still runs (see elaunch status), or elaunch itself was killed."
            " Everything is shown up to the newest event"
        )


class Stage(Enum):
    """What the job did at a moment: the key in `--json`, a label, and the meaning."""

    START_UP = "start_up", "start-up", "from the command to the first step: imports, rendezvous, restoring"
    TRAINING = "training", "training", "steps that count in the end"
    LOST = "lost_steps", "lost work", "steps that a failure undid"
    RUNNING = "running", "workers ran", "the program reports no steps, so how much of this was training is unknown"
    DETECTION = "detection", "detection", "from the failure until an agent detected it"
    STOP = "stop", "stop", "saving the state and ending the other workers"
    RENDEZVOUS = "rendezvous", "rendezvous", "until all nodes agreed on the new ranks"
    SPAWN = "spawn", "spawn", "starting the workers: fork, imports, process group"
    RESTORE = "restore", "restore", "restoring the state, up to the first step"
    END = "end", "end", "from the first exit of a worker that was done to the end of the command"

    def __init__(self, key: str, label: str, meaning: str) -> None:
        self.key, self.label, self.meaning = key, label, meaning


@dataclass(frozen=True)
class Goodput:
    """The time in each stage; together they are the job's. `ettr` is NaN if no step is known.

    `used_h` are the hours in which workers trained (or ran, if no step is known), and `lost_h` those that starts and
    failures cost; `has_gpus` if each worker has a GPU of its own. `recoveries_s` has the time from a generation's end
    to the next step (or run of workers), if any, by generation.
    """

    seconds: Mapping[Stage, float]
    used_h: float
    lost_h: float
    has_gpus: bool
    ettr: float
    recoveries_s: Mapping[int, float]

    @property
    def hours(self) -> str:
        """The workers' hours in words."""
        used = f"{'GPU' if self.has_gpus else 'worker'} hours: {self.used_h:,.2f}"
        how = "in use (the program reports no steps)" if math.isnan(self.ettr) else "productive"
        return f"{used} {how}, {self.lost_h:,.2f} lost to starts and failures"


def goodput(history: History) -> Goodput:
    """The stages of the job, from the times of its generations."""
    walk = _Walk(history.wall_s)
    knows_steps = history.knows_steps
    has_worked = False
    for generation in history.generations:
        walk.workers = generation.world_size or walk.workers
        begun_s = generation.trains_s if knows_steps else generation.forked_s
        if has_worked:
            walk.to(Stage.RENDEZVOUS, generation.sealed_s)
            walk.to(Stage.SPAWN, known_or(generation.ready_s, generation.forked_s))
            if knows_steps:
                walk.to(Stage.RESTORE, known_or(generation.trains_s, generation.ends_s))
        else:
            walk.to(Stage.START_UP, known_or(begun_s, generation.ends_s))
        works = not math.isnan(begun_s)
        if works and knows_steps:
            walk.train(generation)
        elif works:
            walk.to(Stage.RUNNING, known_or(generation.ends_s, history.wall_s))
        has_worked = has_worked or works
        if generation is not history.generations[-1] or history.end.outcome == "failed":
            walk.to(Stage.DETECTION, generation.noted_s)
            walk.to(Stage.STOP, generation.cleared_s)
    if history.generations:
        walk.to(Stage.END if has_worked else Stage.START_UP, history.wall_s)
    ettr = walk.seconds[Stage.TRAINING] / history.wall_s if knows_steps and history.wall_s > 0 else math.nan
    used_h = (walk.worker_s[Stage.TRAINING] + walk.worker_s[Stage.RUNNING]) / 3600
    lost_h = (sum(walk.worker_s.values()) - walk.worker_s[Stage.END]) / 3600 - used_h
    has_gpus = all(node.started.number("gpus") == node.started.number("workers") for node in history.nodes)
    return Goodput(walk.seconds, used_h, lost_h, has_gpus, ettr, _recoveries_s(history, knows_steps=knows_steps))


class _Walk:
    """Assigns the job's time to stages, from its start to its end."""

    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s
        self._now_s = 0.0
        self.workers = 0
        self.seconds, self.worker_s = dict.fromkeys(Stage, 0.0), dict.fromkeys(Stage, 0.0)

    def to(self, stage: Stage, until_s: float) -> None:
        """Assign the time up to `until_s` to `stage`; nothing if that is past or not known."""
        until_s = min(until_s, self._wall_s)
        if until_s > self._now_s:
            self.seconds[stage] += until_s - self._now_s
            self.worker_s[stage] += self.workers * (until_s - self._now_s)
            self._now_s = until_s

    def train(self, generation: PastGeneration) -> None:
        """The steps of a generation: first those that count, then those that were lost."""
        ends_s = min(known_or(generation.ends_s, self._wall_s), self._wall_s)
        done = generation.last_step - generation.first_step + 1
        kept_share = (done - generation.steps_lost) / done if done > 0 else 0.0
        self.to(Stage.TRAINING, self._now_s + max(ends_s - self._now_s, 0.0) * kept_share)
        self.to(Stage.LOST, ends_s)


def _recoveries_s(history: History, *, knows_steps: bool) -> dict[int, float]:
    """By generation, the time from its end until the job resumed."""
    found: dict[int, float] = {}
    resumes_s = math.nan
    for each in reversed(history.generations):
        if each.has_run and not math.isnan(resumes_s - each.ends_s):
            found[each.generation] = resumes_s - each.ends_s
        resumes_s = known_or(each.trains_s if knows_steps else each.forked_s, resumes_s)
    return found
