"""The report of a run as one HTML page without scripts: lanes, plots, and what the template shows (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jinja2

from elaunch.launcher.inspect.history import KILLED, Goodput, History, Incident, PastGeneration
from elaunch.launcher.inspect.node_log import NodeLog, known_or, real, text
from elaunch.launcher.inspect.text import cut, duration, moment, offset, percent, sentence
from elaunch.rendezvous.format import plain, plural
from elaunch.rendezvous.types import UNNAMED

# The timeline has lanes for at most this many ranks.
LANES_MAX = 64
# The page shows at most this many causes, warnings, and (newest) generations.
CARDS_MAX, GENERATIONS_MAX = 60, 50
_LANE_LABELS = {
    "starts": "starts and restores",
    "trains": "trains",
    "runs": "runs (reports no steps)",
    "ends": "saves and exits",
}
_TICK_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200)
# A curve shows at most this many groups of steps, each from its lowest to its highest value.
POINTS = 500
# The plot's size in the template's units, with room for labels on the left.
WIDTH, HEIGHT, LEFT = 720, 180, 62
# Step times above this multiple of the usual one are drawn at the plot's upper edge.
_FAR = 4.0

Series = list[tuple[int, float]]
# Log files: names, and URLs relative to the page.
Links = tuple[tuple[str, str], ...]


class StepMetrics:
    """The series in a metrics file's lines, with `step`, `loss` and `seconds`; `steps` counts the lines of steps."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.loss: Series = []
        self.seconds: Series = []
        self.steps = 0
        for line in lines:
            try:
                # Not `parse_json`: a loss may be NaN.
                record = json.loads(line)
            except (ValueError, RecursionError, MemoryError):
                continue
            step = record.get("step") if isinstance(record, dict) else None
            if type(step) is not int or not 0 <= step < 1 << 53:
                continue
            self.steps += 1
            loss, seconds = real(record.get("loss")), real(record.get("seconds"))
            if not math.isnan(loss):
                self.loss.append((step, loss))
            if seconds >= 0:
                self.seconds.append((step, seconds))


@dataclass(frozen=True)
class Report:
    """The data of a run's report. `links` are the logs of failed ranks, `stacks` are by generation."""

    history: History
    goodput: Goodput
    metrics: StepMetrics | None = None
    metrics_path: str = ""
    links: Mapping[Incident, Links] = field(default_factory=dict)
    stacks: Mapping[int, Links] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The job in one sentence."""
        history, end = self.history, self.history.end
        name = f"Job {history.run_id}" if history.run_id not in ("", UNNAMED) else "The job"
        length = duration(history.wall_s)
        how = {
            "succeeded": f"succeeded after {length}",
            "failed": f"failed after {length}",
            "interrupted": f"was stopped after {length}",
            "refused": f"was refused after {length}",
            KILLED: f"ended after {length}, since {end.reason.partition(',')[0]}",
            "": f"has a log without an end, which stops {length} after the start",
        }.get(end.outcome, f"ended in an unknown way after {length}")
        restarts = plural(end.restarts, "restart") if end.restarts else "no restart"
        if end.outcome == "failed" and end.max_restarts >= 0:
            restarts = f"{end.restarts} of {plural(end.max_restarts, 'restart')} used"
        lost = "" if history.steps_lost < 0 else f", {plural(history.steps_lost, 'step')} lost"
        return f"{name} {how}: {restarts}{lost}."

    @property
    def reason(self) -> str:
        """Why the job did not succeed: its first failure if of another kind, the decisive one, and the verdict."""
        end = self.history.end
        cause = next((fault for fault in reversed(self.history.faults) if fault.is_cause), None)
        if end.outcome != "failed" or cause is None:
            return sentence(end.reason) if end.outcome != "succeeded" else ""
        given_up = f" The job was given up: {end.reason}." if end.reason and end.reason != cause.sentence else ""
        verdicts = (event for node in self.history.nodes for event in node.events if event.event == "gave_up")
        first = next(filter(None, (text(event.record("first_failure").get("sentence")) for event in verdicts)), "")
        began = f"It failed first: {cut(first, 400)}. " if first else ""
        return f"{began}{sentence(cut(cause.sentence, 400))}{given_up}"

    @property
    def causes(self) -> list[Incident]:
        """The newest failures that ended a generation."""
        return [fault for fault in self.history.faults if fault.is_cause][-CARDS_MAX:]

    def after(self, shown: Incident) -> str:
        """What came after a failure or a warning."""
        history = self.history
        if shown.is_warning:
            is_over = not math.isnan(shown.until_s)
            return f"The job resumed {duration(shown.until_s - shown.at_s)} later." if is_over else ""
        recovery_s = self.goodput.recoveries_s.get(shown.generation, math.nan)
        if math.isnan(recovery_s):
            sealed = [each.generation for each in history.generations if not math.isnan(each.sealed_s)]
            is_later = shown.generation < max(sealed, default=-1)
            return f"No later generation {'made a step' if history.knows_steps else 'ran'}." if is_later else ""
        lost = next((each.steps_lost for each in history.generations if each.generation == shown.generation), 0)
        steps = f"; {plural(lost, 'step')} lost" if history.knows_steps else ""
        return f"{'Training' if history.knows_steps else 'The job'} resumed {duration(recovery_s)} later{steps}."


@dataclass(frozen=True)
class Bar:
    """A segment of a lane; `doing` is the name of its colour."""

    doing: str
    begin_s: float
    end_s: float
    note: str


@dataclass(frozen=True)
class Lane:
    """One row of the timeline: a local rank of a node, with its failures and warnings."""

    node: NodeLog
    name: str
    bars: tuple[Bar, ...]
    marks: tuple[Incident, ...]


@dataclass(frozen=True)
class Timeline:
    """The lanes in the order of nodes and local ranks, from `begin_s` on, for the newest generations."""

    lanes: tuple[Lane, ...]
    begin_s: float
    left_out: int


def timeline(report: Report) -> Timeline:
    """At most `LANES_MAX` lanes, preferably those with a failure or a warning."""
    history = report.history
    marks: dict[tuple[str, int], list[Incident]] = {}
    for each in (*history.faults, *history.warned):
        marks.setdefault((each.folder, each.local_rank), []).append(each)
    # -1 stands for a node that never had a worker.
    of_node = [(node, {rank for visit in node.visits for rank in visit.by_rank} or {-1}) for node in history.nodes]
    places = [(node, rank) for node, ranks in of_node for rank in sorted(ranks)]
    order = sorted(range(len(places)), key=lambda at: (places[at][0].folder, places[at][1]) not in marks)
    newest = history.generations[-GENERATIONS_MAX:]
    begin_s = known_or(newest[0].opened_s, 0.0) if len(newest) < len(history.generations) else 0.0
    lanes = []
    for node, rank in (places[at] for at in sorted(order[:LANES_MAX])):
        # Incidents without a rank are shown with the node's first lane.
        mine = marks.pop((node.folder, -1), []) + marks.get((node.folder, rank), [])
        ranks = dict.fromkeys(w.rank for visit in node.visits for w in visit.workers if w.local_rank == rank)
        name = f"rank {', '.join(map(str, [*ranks][:3]))}" if ranks else "no worker"
        bars = tuple(_bars(node, rank, {past.generation: past for past in newest}, begin_s))
        lanes.append(Lane(node, name, bars, tuple(mark for mark in mine if mark.at_s >= begin_s)))
    return Timeline(tuple(lanes), begin_s, max(len(places) - LANES_MAX, 0))


def _bars(node: NodeLog, local_rank: int, generations: Mapping[int, PastGeneration], begin_s: float) -> Iterator[Bar]:
    """The bars of a lane, in order and without overlaps."""
    free_s = begin_s
    for visit in node.visits:
        worker, generation = visit.by_rank.get(local_rank), generations.get(visit.generation)
        if worker is None or generation is None:
            continue
        exited_s = known_or(worker.exited_s, node.end_s)
        ends_s = min(known_or(generation.ends_s, exited_s), exited_s)
        who = f"generation {visit.generation}, rank {worker.rank}, pid {worker.pid}"
        stretches = [("runs", ends_s, who)]
        if not math.isnan(generation.trains_s):
            steps = f"{who}, steps {generation.first_step:,} to {generation.last_step:,}"
            stretches = [("starts", min(generation.trains_s, ends_s), who), ("trains", ends_s, steps)]
        free_s = max(free_s, worker.forked_s)
        for doing, until_s, what in (*stretches, ("ends", exited_s, f"{who}, exit code {worker.code}")):
            if until_s > free_s:
                yield Bar(doing, free_s, until_s, f"{what}: {_LANE_LABELS[doing]} ({duration(until_s - free_s)})")
                free_s = until_s


def render(report: Report, template: str) -> str:
    """The HTML. jinja2 escapes every value."""
    history, lanes = report.history, timeline(report)
    length_s = max(history.wall_s - lanes.begin_s, 1e-3)
    ran = [each for each in history.generations if each.has_run] or history.generations
    followers: dict[int, list[Incident]] = {}
    for fault in history.faults:
        if not fault.is_cause:
            followers.setdefault(fault.generation, []).append(fault)
    used = {bar.doing for lane in lanes.lanes for bar in lane.bars}
    warnings = history.warned[:CARDS_MAX]
    cards = {shown: f"card-{number}" for number, shown in enumerate((*report.causes, *warnings))}
    tick_s = next((each for each in _TICK_STEPS if length_s / each <= 10), 86400 * math.ceil(length_s / 864000))
    ticks = range(math.ceil(lanes.begin_s / tick_s), math.floor((lanes.begin_s + length_s) / tick_s) + 1)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = {each.__name__: each for each in (cut, duration, offset, percent, plural)}
    # A log may hold anything, also bidirectional control characters.
    environment.filters |= {**filters, "printable": lambda value: plain(value, keep="\n\t")}
    return environment.from_string(template).render(
        report=report,
        history=history,
        end=history.end,
        goodput=report.goodput,
        timeline=lanes,
        labels={doing: label for doing, label in _LANE_LABELS.items() if doing in used},
        ticks=[(number * tick_s, offset(number * tick_s).removesuffix(".0")) for number in ticks],
        place=lambda at_s: f"{100 * (at_s - lanes.begin_s) / length_s:.4f}%",
        width=lambda seconds: f"{100 * seconds / length_s:.4f}%",
        stages=[(stage, seconds) for stage, seconds in report.goodput.seconds.items() if seconds > 0],
        wall_s=max(history.wall_s, 1e-3),
        sections=[
            ("What failed, and why", report.causes, sum(f.is_cause for f in history.faults) - len(report.causes)),
            ("Warnings", warnings, len(history.warned) - len(warnings)),
        ],
        followers=followers,
        charts=charts(report.metrics) if report.metrics else [],
        generations=ran[-GENERATIONS_MAX:],
        generations_left_out=max(len(ran) - GENERATIONS_MAX, 0),
        card=cards.get,
        hosts=list(dict.fromkeys(node.host for node in history.nodes)),
        clock=lambda at_s: moment(history.began_at + at_s, history.utc_offset_s),
        zone=f"UTC{history.utc_offset_s / 3600:+g}",
        is_known=lambda value: not math.isnan(value),
    )


@dataclass(frozen=True)
class Chart:
    """One plot: `path` outlines the lowest and highest values; the axes' ends have labels."""

    title: str
    path: str
    low: str
    high: str
    first: str
    last: str
    remark: str


def charts(metrics: StepMetrics) -> list[Chart]:
    """The plots of the series with two points or more."""
    found = []
    if len(metrics.loss) > 1:
        values = [value for _, value in metrics.loss]
        found.append(_chart("Loss", metrics.loss, min(values), max(values), ""))
    if len(metrics.seconds) > 1:
        step, slowest_s = max(metrics.seconds, key=lambda point: point[1])
        usual_s = median(value for _, value in metrics.seconds)
        is_far = slowest_s > _FAR * usual_s > 0
        remark = f"the slowest step, {step:,}, took {duration(slowest_s)}" if is_far else ""
        found.append(_chart("Step time (s)", metrics.seconds, 0.0, _FAR * usual_s if is_far else slowest_s, remark))
    return found


def _chart(title: str, series: Series, low: float, high: float, remark: str) -> Chart:
    first, last = series[0][0], max(series[-1][0], series[0][0] + 1)

    def at(step: int, value: float) -> str:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT)
        share = (min(value, high) - low) / (high - low) if high > low else 0.5
        return f"{x:.2f},{(1 - share) * HEIGHT:.2f}"

    width = math.ceil(len(series) / POINTS)
    groups = [series[begin : begin + width] for begin in range(0, len(series), width)]
    outline = [at(group[0][0], max(value for _, value in group)) for group in groups]
    outline += [at(group[0][0], min(value for _, value in group)) for group in reversed(groups)]
    ends = (f"{low:.5g}", f"{high:.5g}", f"step {first:,}", f"step {last:,}")
    return Chart(title, f"M{'L'.join(outline)}Z", *ends, remark)
