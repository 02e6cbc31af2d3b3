"""The history of a job: its generations with the times of their stages, and its end (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median

from elaunch.launcher.report_page.ending import DIED, SKEW_S, End, Life, Look, end_of, seen
from elaunch.launcher.report_page.events import PastEvent, ReadLines
from elaunch.launcher.report_page.faults import Fault, faults_of
from elaunch.launcher.report_page.metrics import StepMetrics, Stretch
from elaunch.launcher.report_page.node_log import NodeLog, Visit, named, node_log
from elaunch.launcher.report_page.warned import Warned, warned_of
from elaunch.launcher.report_page.wording import duration


@dataclass(frozen=True)
class NodeFolder:
    """What one node's log folder holds. `host` and `run_id` are guesses from its name, for logs without them."""

    path: str
    host: str
    run_id: str
    lines: ReadLines


@dataclass(frozen=True)
class PastGeneration:
    """One generation of the job. Times are seconds of the job, NaN if not known.

    `opened_s` … `ready_s` are the stages of its start, up to where its workers restore the state; `trains_s` is when
    its first step began, `ends_s` when the training stopped, `noted_s` when an agent knew why, `cleared_s` when all its
    processes were gone. Of its steps `first_step` … `last_step` all up to `kept_step` count; later generations did the
    others again. -1: not known. `trained_s` is the time of the steps that count, NaN if only the agents know steps.
    """

    number: int
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
    trained_s: float

    @property
    def has_run(self) -> bool:
        """Whether it had workers. The end of a job may open a generation that comes to nothing."""
        return self.world_size > 0

    @property
    def steps_lost(self) -> int:
        return self.last_step - self.kept_step if self.last_step >= 0 else 0


@dataclass(frozen=True)
class History:
    """The whole job. `began_at` is second 0 on the wall clock; `remarks` are what the reader must know of the data."""

    run_id: str
    command: str
    version: str
    began_at: float
    utc_offset_s: int
    nodes: tuple[NodeLog, ...]
    generations: tuple[PastGeneration, ...]
    faults: tuple[Fault, ...]
    warned: tuple[Warned, ...]
    end: End
    steps_lost: int
    remarks: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        return self.end.at_s

    @property
    def knows_steps(self) -> bool:
        """Whether some generation reported steps."""
        return any(generation.last_step >= 0 for generation in self.generations)

    @property
    def last_that_ran(self) -> int:
        """The newest generation whose table was sealed, -1 if there is none. A job's end may have opened another."""
        ran = (generation.number for generation in self.generations if not math.isnan(generation.sealed_s))
        return max(ran, default=-1)


def history(folders: Sequence[NodeFolder], metrics: StepMetrics | None, look: Look | None = None) -> History:
    """The history that these folders of one job tell; at least one has an event."""
    folders = sorted((f for f in folders if f.lines.events), key=lambda f: (_first_rank(f), f.lines.events[0].at_s))
    shifts = [_shift(folders[0], folder) for folder in folders]
    origin = min(folder.lines.events[0].at_s + shift for folder, shift in zip(folders, shifts, strict=True))
    nodes = tuple(
        node_log(f.path, _host(f), f.run_id, f.lines.events, origin, shift)
        for f, shift in zip(folders, shifts, strict=True)
    )
    faults = faults_of(nodes)
    end = end_of(nodes)
    if look:
        end = seen(end, nodes, [look.at + shift - origin for shift in shifts], look)
    started = started_event(folders[0])
    generations = _generations(nodes, faults, end, metrics, origin)
    counted = sum(generation.steps_lost for generation in generations)
    knows = any(generation.last_step >= 0 for generation in generations)
    in_metrics = metrics.steps_lost if metrics else -1
    return History(
        run_id=(started.text("run_id") if started else "") or folders[0].run_id,
        command=started.text("command") if started else "",
        version=started.text("version") if started else "",
        began_at=origin,
        utc_offset_s=_utc_offset_s(started),
        nodes=named(nodes),
        generations=generations,
        faults=faults,
        warned=warned_of(nodes, faults),
        end=end,
        steps_lost=max(counted if knows else -1, in_metrics),
        remarks=tuple(_remarks(folders, shifts, end)),
    )


def started_event(folder: NodeFolder) -> PastEvent | None:
    """The folder's event `started`, which has the run's data; None if its timeline has lost it."""
    return next((event for event in folder.lines.events if event.event == "started"), None)


def _host(folder: NodeFolder) -> str:
    started = started_event(folder)
    return (started.text("host") if started else "") or folder.host


def _utc_offset_s(started: PastEvent | None) -> int:
    offset_s = started.number("utc_offset_s", 0) if started else 0
    return offset_s if abs(offset_s) <= 14 * 3600 else 0


def _first_rank(folder: NodeFolder) -> int:
    """The node's first rank in its first generation: the node of rank 0 comes first, and its clock counts."""
    for event in folder.lines.events:
        if event.event == "forked" and event.number("rank") >= 0:
            return event.number("rank")
    return 1 << 62


def _shift(reference: NodeFolder, folder: NodeFolder) -> float:
    """Seconds to add to a host's clock to get the reference's: they seal the same generations at the same moments."""
    sealed = [
        {event.generation: event.at_s for event in each.lines.events if event.event == "sealed"}
        for each in (reference, folder)
    ]
    apart = [sealed[0][number] - sealed[1][number] for number in sealed[0].keys() & sealed[1].keys()]
    shift = median(apart) if apart else 0.0
    return shift if abs(shift) > SKEW_S else 0.0


def _generations(
    nodes: Sequence[NodeLog], faults: Sequence[Fault], end: End, metrics: StepMetrics | None, origin: float
) -> tuple[PastGeneration, ...]:
    visits: dict[int, list[Visit]] = {}
    for node in nodes:
        for visit in node.visits:
            visits.setdefault(visit.generation, []).append(visit)
    numbers = sorted(visits)
    causes = {fault.generation: fault for fault in faults if fault.is_cause}
    rates = [each.steps_per_s for node in nodes for visit in node.visits for each in visit.progress]
    usual_rate = median([rate for rate in rates if rate > 0] or [math.nan])
    stretches = _stretches(metrics, origin, end.at_s)
    drafts = [
        _generation(
            number,
            visits[number],
            causes.get(number),
            _first(visit.at("opened") for visit in visits.get(after, ())),
            end,
            stretches.get(number),
            origin,
            usual_rate,
        )
        for number, after in zip_longest(numbers, numbers[1:], fillvalue=-1)
    ]
    return tuple(_with_kept(drafts))


def _stretches(metrics: StepMetrics | None, origin: float, wall_s: float) -> Mapping[int, Stretch]:
    """The steps of each generation. An older run in the same file has other times, or comes before."""
    found: dict[int, Stretch] = {}
    for stretch in metrics.stretches if metrics else ():
        known = found.get(stretch.generation)
        if math.isnan(stretch.end_at):
            found[stretch.generation] = stretch
        elif origin - 1 <= stretch.end_at <= origin + wall_s + 1:
            # Two stretches have steps between them that could not be written.
            found[stretch.generation] = known.joined(stretch) if known else stretch
    return found


def _generation(
    number: int,
    visits: Sequence[Visit],
    cause: Fault | None,
    next_opened_s: float,
    end: End,
    stretch: Stretch | None,
    origin: float,
    usual_rate: float,
) -> PastGeneration:
    seated = [visit for visit in visits if visit.workers] or list(visits)
    exits = [worker.exited_s for visit in seated for worker in visit.workers]
    noted_s = _first([next_opened_s, *(visit.at("failed") for visit in seated)])
    if math.isnan(noted_s) and cause:
        noted_s = cause.at_s
    if math.isnan(noted_s):
        noted_s = _first([*(visit.at("signalled") for visit in seated), *exits])
    ends_s = _first([noted_s, cause.at_s - cause.quiet_s if cause else math.nan])
    trains_s, first_step, last_step, trained_s = _steps(seated, stretch, origin, known_or(ends_s, end.at_s), usual_rate)
    is_last = math.isnan(next_opened_s)
    if is_last and end.life.goes_on:
        # The next step is on its way.
        trained_s = math.nan
    elif stretch and not math.isnan(stretch.end_at) and (is_last or (cause and cause.kind in ("hang", ""))):
        # What comes after the last step is no training: an evaluation, or a hang.
        ends_s = _first([ends_s, stretch.end_at - origin])
    return PastGeneration(
        number,
        kind=next((visit.kind for visit in visits if visit.kind), ""),
        reason=next((visit.reason for visit in seated if visit.reason), ""),
        world_size=max(visit.world_size for visit in visits) or sum(len(visit.workers) for visit in visits),
        hosts=sum(bool(visit.workers) for visit in visits),
        opened_s=_first(visit.at("opened") for visit in visits),
        sealed_s=_last(visit.at("sealed") for visit in seated),
        forked_s=_last(worker.forked_s for visit in seated for worker in visit.workers),
        ready_s=_last(visit.marks.get("restoring", math.nan) for visit in seated),
        trains_s=trains_s,
        ends_s=ends_s,
        noted_s=noted_s,
        cleared_s=_last([*(visit.at("cleared") for visit in seated), *(visit.at("stopped") for visit in seated)]),
        first_step=first_step,
        last_step=last_step,
        kept_step=last_step,
        trained_s=trained_s,
    )


def _steps(
    visits: Sequence[Visit], stretch: Stretch | None, origin: float, ends_s: float, usual_rate: float
) -> tuple[float, int, int, float]:
    """When the first step began, the first and last step, and the time in steps (NaN if only the agents know)."""
    progress = [each for visit in visits for each in visit.progress]
    first = min((each.first_step for each in progress if each.first_step >= 0), default=-1)
    last = max((each.step for each in progress), default=-1)
    begun_s = _first_step_began_s(visits, usual_rate) if progress else math.nan
    if progress or stretch:
        begun_s = known_or(_last(visit.marks.get("restored", math.nan) for visit in visits), begun_s)
    if stretch is None:
        return begun_s, first, last, math.nan
    first = stretch.first_step if first < 0 else min(first, stretch.first_step)
    if math.isnan(begun_s):
        begun_s = ends_s - stretch.trained_s if math.isnan(stretch.begin_at) else stretch.begin_at - origin
    return begun_s, first, max(last, stretch.last_step), stretch.trained_s


def _first_step_began_s(visits: Sequence[Visit], usual_rate: float) -> float:
    """When the first step of the generation began: on the node that was the first to complete one.

    If the others were so little later that their clocks explain it, the first of `visits` counts, as for all times.
    """
    done = {at: visit.stepped_s for at, visit in enumerate(visits) if not math.isnan(visit.stepped_s)}
    done = done or {at: visit.progress[0].at_s for at, visit in enumerate(visits) if visit.progress}
    earliest_s = min(done.values())
    return _began_s(visits[next(at for at, done_s in done.items() if done_s <= earliest_s + SKEW_S)], usual_rate)


def _began_s(visit: Visit, usual_rate: float) -> float:
    """When the first step of a node began: one step before a worker said that it was complete.

    Without that word the agent's looks, once a second, must do: how long ago the first step began, the rate tells. If
    no rate is known, the job was so short that all steps came between two looks.
    """
    seen, newest = visit.progress[0], max(visit.progress, key=lambda each: each.step)
    first = min((each.first_step for each in visit.progress if each.first_step >= 0), default=-1)
    rate = next((each.steps_per_s for each in visit.progress if each.steps_per_s > 0), usual_rate)
    if not math.isnan(visit.stepped_s):
        steps, took_s = newest.step - first if first >= 0 else 0, newest.at_s - visit.stepped_s
        begun_s = visit.stepped_s - (took_s / steps if steps > 0 and took_s > 0 else 1 / rate if rate > 0 else math.inf)
    else:
        begun_s = seen.at_s - ((seen.step - first + 1) / rate if first >= 0 and rate > 0 else math.inf)
    forked_s = _last(worker.forked_s for worker in visit.workers)
    return max(begun_s, known_or(forked_s, visit.at("sealed")), 0.0)


def _with_kept(drafts: Sequence[PastGeneration]) -> list[PastGeneration]:
    """The generations with the steps that count: where a later one began, all later steps were done again."""
    kept: list[PastGeneration] = []
    restored = 1 << 62
    for draft in reversed(drafts):
        if draft.last_step >= 0:
            kept_step = max(min(draft.last_step, restored), draft.first_step - 1)
            kept.append(replace(draft, kept_step=kept_step))
        else:
            kept.append(draft)
        if draft.first_step >= 0:
            restored = min(restored, draft.first_step - 1)
    return kept[::-1]


def _remarks(folders: Sequence[NodeFolder], shifts: Sequence[float], end: End) -> Iterable[str]:
    for folder, shift in zip(folders, shifts, strict=True):
        lines, host = folder.lines, _host(folder)
        if shift:
            how = f"{abs(shift):.1f} s {'behind' if shift > 0 else 'ahead of'}"
            yield f"{host}'s clock was {how} {_host(folders[0])}'s; its times are corrected here"
        if lines.is_torn:
            yield f"The last line of {host}'s timeline is cut: its agent still writes, was killed, or had no disk space"
        if lines.is_cut:
            yield f"{host}'s timeline is too long; only the beginning is shown"
        if lines.unreadable:
            yield f"{lines.unreadable} lines of {host}'s timeline cannot be read and are left out"
        yield from (event.text("reason") for event in lines.events if event.event == DIED)
        started = started_event(folder)
        schema = started.number("schema", 0) if started else 0
        if schema == 0:
            yield f"{host}'s timeline is from an older elaunch: steps, causes and advice are missing in it"
        elif schema > 1:
            yield f"{host}'s timeline is from a newer elaunch (schema {schema}): this release may not show all of it"
    if end.life is Life.RUNS:
        yield "The job still runs: its agent answers. Everything is shown up to the time at which this report was made"
    elif end.life is Life.SEEMS_TO_RUN:
        yield f"The job seems to run: its newest event was {duration(end.silent_s)} old when this report was made"
    elif end.life is Life.UNKNOWN:
        age = "" if math.isnan(end.silent_s) else f", which was {duration(end.silent_s)} old when this report was made"
        yield (
            "No node says how the job ended: it still runs (see elaunch status), or elaunch itself was killed."
            f" Everything is shown up to the newest event{age}"
        )


def _first(times: Iterable[float]) -> float:
    return min((at_s for at_s in times if not math.isnan(at_s)), default=math.nan)


def _last(times: Iterable[float]) -> float:
    return max((at_s for at_s in times if not math.isnan(at_s)), default=math.nan)


def known_or(value: float, default: float) -> float:
    """`value`, or `default` where it is not known (NaN)."""
    return default if math.isnan(value) else value
