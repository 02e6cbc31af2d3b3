"""The page: what it says, from the history and its parts, and the template that makes HTML of it (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from urllib.parse import quote

from elaunch.launcher.report_page.charts import Chart, chart
from elaunch.launcher.report_page.ending import KILLED, Life
from elaunch.launcher.report_page.events import text
from elaunch.launcher.report_page.faults import Fault
from elaunch.launcher.report_page.goodput import Goodput, Stage, StagePart, by_stage
from elaunch.launcher.report_page.history import History, PastGeneration
from elaunch.launcher.report_page.lanes import Lanes, lanes_of
from elaunch.launcher.report_page.metrics import StepMetrics
from elaunch.launcher.report_page.profiles import ShownProfile
from elaunch.launcher.report_page.warned import Warned, WarnedKind
from elaunch.launcher.report_page.wording import count, cut, duration, offset
from elaunch.rendezvous.job_spec import UNNAMED

# Causes that the page shows with all they have; of more the first and the last are shown.
CAUSES_MAX = 60
# Warnings that the page shows, and that are printed.
WARNINGS_MAX = 60
PRINTED_MAX = 5
_SHOWN_ENDS = {
    "succeeded": "succeeded",
    "failed": "failed",
    "interrupted": "was stopped",
    "refused": "was refused",
    "unknown": "ended in an unknown way",
}


@dataclass(frozen=True)
class LogLink:
    """A log file and its address relative to the page."""

    name: str
    href: str


@dataclass(frozen=True)
class ShownCause:
    """A failure as the page shows it: the cause of a generation's end, and those that followed from it.

    `lost_s` is the work that was lost, `recovery_s` the time until the job went on: NaN if it did not.
    """

    number: int
    fault: Fault
    followers: tuple[Fault, ...]
    cost: tuple[StagePart, ...]
    lost_s: float
    recovery_s: float
    steps_lost: int
    tail: str
    is_silent: bool
    links: tuple[LogLink, ...]
    stacks: tuple[LogLink, ...]


@dataclass(frozen=True)
class ShownWarning:
    """A warning as the page shows it; `number` is that among all of the job."""

    number: int
    warned: Warned
    after: str
    stacks: tuple[LogLink, ...]


@dataclass(frozen=True)
class Page:
    """All that the template shows."""

    history: History
    goodput: Goodput
    lanes: Lanes
    causes: tuple[ShownCause, ...]
    causes_left_out: int
    warnings: tuple[ShownWarning, ...]
    warnings_left_out: int
    charts: tuple[Chart, ...]
    profiles: tuple[tuple[ShownProfile, tuple[LogLink, ...]], ...]
    logs: tuple[tuple[str, tuple[LogLink, ...]], ...]
    metrics_path: str

    @property
    def generations(self) -> tuple[PastGeneration, ...]:
        """Those that have run; all of a job that never had a worker."""
        ran = tuple(generation for generation in self.history.generations if generation.has_run)
        return ran or self.history.generations


def headline(history: History, found: Goodput) -> str:
    """The job in one sentence."""
    end = history.end
    name = f"Job {history.run_id}" if history.run_id not in ("", UNNAMED) else "The job"
    length = duration(found.wall_s)
    match end.life:
        case Life.RUNS:
            how = f"has been running for {length}"
        case Life.SEEMS_TO_RUN:
            how = f"seems to be running, for {length} by now"
        case Life.UNKNOWN:
            how = f"has no end in its log, which stops {length} after the start"
        case Life.ENDED if end.outcome == KILLED:
            how = f"ended after {length}, since {end.reason.partition(',')[0]}"
        case Life.ENDED:
            how = f"{_SHOWN_ENDS.get(end.outcome, _SHOWN_ENDS['unknown'])} after {length}"
    if end.outcome == "failed" and end.max_restarts >= 0:
        restarts = f"{end.restarts} of {count(end.max_restarts, 'restart')} used"
    else:
        restarts = count(end.restarts, "restart") if end.restarts else "no restart"
    lost = "" if history.steps_lost < 0 else f", {count(history.steps_lost, 'step')} lost"
    return f"{name} {how}: {restarts}{lost}."


def subline(history: History) -> str:
    """What comes right below: the reason of an end that is no success."""
    end = history.end
    cause = next((fault for fault in reversed(history.faults) if fault.is_cause), None)
    if end.outcome == "failed" and cause:
        reason = f" The job was given up: {end.reason}." if end.reason and end.reason != cause.sentence else ""
        return f"{_first_of(history)}{_sentence(cut(cause.sentence, 400))}{reason}"
    return f"{_sentence(end.reason)}" if end.outcome not in ("succeeded", "") and end.reason else ""


def _first_of(history: History) -> str:
    """The job's first failure, if the one that ended the job is of another kind."""
    events = (event for node in history.nodes for _, event in node.events if event.event == "gave_up")
    first = next(filter(None, (event.record("first_failure") for event in events)), None)
    if not first:
        return ""
    where = f" in generation {first.get('generation')}"
    said = text(first.get("sentence")).partition("\n")[0].removesuffix(where)
    return f"Failed first{where}: {cut(said, 400)}. "


def _sentence(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return f"{first[:1].upper()}{first[1:]}{'' if first.endswith('.') else '.'}" if first else ""


def make_page(
    history: History,
    found: Goodput,
    metrics: StepMetrics | None,
    links: Mapping[tuple[str, int, int], tuple[LogLink, ...]],
    tails: Mapping[int, str],
    metrics_path: str = "",
    stacks: Mapping[int, tuple[LogLink, ...]] | None = None,
    profiles: Sequence[tuple[ShownProfile, tuple[LogLink, ...]]] = (),
) -> Page:
    """The page's content.

    `links` are by folder, generation and rank, `tails` by the number of the failure, `stacks` by generation. Each of
    `profiles` comes with links to its files.
    """
    stacks = stacks or {}
    warnings, newest = open_warnings(history), history.last_that_ran
    return Page(
        history,
        found,
        lanes_of(history, found),
        *_causes(history, found, links, tails, stacks),
        warnings=tuple(
            ShownWarning(number, warned, _after(warned, history, newest), stacks.get(warned.generation, ()))
            for number, warned in warnings[:WARNINGS_MAX]
        ),
        warnings_left_out=max(len(warnings) - WARNINGS_MAX, 0),
        charts=_charts(history, metrics),
        profiles=tuple(profiles),
        logs=_logs(history, links),
        metrics_path=metrics_path,
    )


def open_warnings(history: History) -> list[tuple[int, Warned]]:
    """The warnings that became no failure, with their numbers among all of the job."""
    return [(number, warned) for number, warned in enumerate(history.warned) if not warned.is_failure]


def _after(warned: Warned, history: History, newest: int) -> str:
    """What came after a warning of a hang."""
    if warned.kind is not WarnedKind.HANG:
        return ""
    if not math.isnan(warned.until_s):
        return f"The job went on by itself {duration(warned.until_s - warned.at_s)} later."
    if warned.generation == newest and history.end.life.goes_on:
        return f"The job has not gone on since: {duration(history.wall_s - warned.at_s)}."
    return f"No event says that generation {warned.generation} went on."


def printed(page: Page) -> list[str]:
    """What `elaunch report` prints about the job: its headline, then what was only warned of."""
    warnings = open_warnings(page.history)
    lines = [
        f"  {offset(shown.warned.at_s)}  {_sentence(cut(shown.warned.sentence, 400))} {shown.after}".rstrip()
        for shown in page.warnings[:PRINTED_MAX]
    ]
    more = len(warnings) - PRINTED_MAX
    lines += [f"  And {count(more, 'more warning', 'more warnings')}."] if more > 0 else []
    return [headline(page.history, page.goodput), *lines]


def shown_causes(history: History) -> list[int]:
    """The numbers of the failures that the page shows as causes: all, or the first and last of many."""
    numbers = [number for number, fault in enumerate(history.faults) if fault.is_cause]
    half = CAUSES_MAX // 2
    return numbers if len(numbers) <= CAUSES_MAX else [*numbers[:half], *numbers[-half:]]


def _causes(
    history: History,
    found: Goodput,
    links: Mapping[tuple[str, int, int], tuple[LogLink, ...]],
    tails: Mapping[int, str],
    stacks: Mapping[int, tuple[LogLink, ...]],
) -> tuple[tuple[ShownCause, ...], int]:
    generations = {generation.number: generation for generation in history.generations}
    followers: dict[int, list[Fault]] = {}
    for fault in history.faults:
        if not fault.is_cause:
            followers.setdefault(fault.generation, []).append(fault)
    shown = shown_causes(history)
    causes = []
    for number in shown:
        fault = history.faults[number]
        recovery_s = found.recoveries_s.get(fault.generation, math.nan)
        cost = () if math.isnan(recovery_s) else found.cost(fault.generation)
        generation = generations.get(fault.generation)
        causes.append(
            ShownCause(
                number,
                fault,
                tuple(followers.get(fault.generation, ())),
                cost,
                sum(part.length_s for part in cost if part.stage is Stage.LOST),
                recovery_s,
                generation.steps_lost if generation else 0,
                tails.get(number, ""),
                number in tails and not tails[number],
                links.get((fault.folder, fault.generation, fault.rank), ()),
                stacks.get(fault.generation, ()),
            )
        )
    return tuple(causes), sum(fault.is_cause for fault in history.faults) - len(shown)


def _charts(history: History, metrics: StepMetrics | None) -> tuple[Chart, ...]:
    if metrics is None:
        return ()
    charts = (
        chart("Loss", "", metrics.loss, history.generations, from_zero=False),
        chart("Step time", "s", metrics.seconds, history.generations, from_zero=True),
    )
    return tuple(each for each in charts if each)


def _logs(
    history: History, links: Mapping[tuple[str, int, int], tuple[LogLink, ...]]
) -> tuple[tuple[str, tuple[LogLink, ...]], ...]:
    hosts = {node.folder: node.name for node in history.nodes}
    many = len(history.nodes) > 1
    return tuple(
        (f"generation {generation}, rank {rank}{f' on {hosts.get(folder)}' if many else ''}", files)
        for (folder, generation, rank), files in sorted(links.items(), key=lambda each: (each[0][1], each[0][2]))
    )


def link_to(path: str, relative: str) -> LogLink:
    """A link to a file. Any byte may be in a path, so each that has a meaning in an address is quoted."""
    return LogLink(PurePath(path).name, quote(relative, errors="surrogateescape"))


def summary(page: Page) -> dict[str, object]:
    """The numbers for programs (`--json`). What is not known is null."""
    history, found = page.history, page.goodput
    lengths = dict.fromkeys(Stage, 0.0) | dict(by_stage(found.parts))
    return {
        "run_id": history.run_id,
        "headline": headline(history, found),
        "state": history.end.life.value,
        "outcome": history.end.outcome or None,
        "exit_code": history.end.code if history.end.code >= 0 else None,
        "reason": history.end.reason,
        "command": history.command,
        "began_at": history.began_at,
        "wall_s": _number(found.wall_s),
        "ettr": _number(found.ettr),
        "recovery_s_median": _number(found.recovery_s),
        "restarts": history.end.restarts,
        "max_restarts": history.end.max_restarts if history.end.max_restarts >= 0 else None,
        "steps_lost": history.steps_lost if history.steps_lost >= 0 else None,
        "breakdown_s": {stage.value: _number(seconds) for stage, seconds in lengths.items()},
        "nodes": [{"host": node.host, "folder": node.folder} for node in history.nodes],
        "generations": [_generation(generation) for generation in page.generations],
        "failures": [_failure(fault, history, found) for fault in history.faults],
        "warnings": [_warning(warned, history) for warned in history.warned],
        "profiles": [_profile(shown) for shown, _ in page.profiles],
        "remarks": list(history.remarks),
    }


def _generation(generation: PastGeneration) -> dict[str, object]:
    return {
        "generation": generation.number,
        "kind": generation.kind,
        "reason": generation.reason,
        "world_size": generation.world_size,
        "hosts": generation.hosts,
        "first_step": generation.first_step if generation.first_step >= 0 else None,
        "last_step": generation.last_step if generation.last_step >= 0 else None,
        "steps_lost": generation.steps_lost,
        "trains_s": _number(generation.trains_s),
        "ends_s": _number(generation.ends_s),
    }


def _failure(fault: Fault, history: History, found: Goodput) -> dict[str, object]:
    return {
        "generation": fault.generation,
        "is_cause": fault.is_cause,
        "at": round(history.began_at + fault.at_s, 3),
        "at_s": _number(fault.at_s),
        "host": fault.host,
        "rank": fault.rank if fault.rank >= 0 else None,
        "pid": fault.pid if fault.pid >= 0 else None,
        "kind": fault.kind,
        "sentence": fault.sentence,
        "advice": fault.advice,
        "recovery_s": _number(found.recoveries_s.get(fault.generation, math.nan)) if fault.is_cause else None,
    }


def _warning(warned: Warned, history: History) -> dict[str, object]:
    return {
        "kind": warned.kind.value,
        "generation": warned.generation,
        "at": round(history.began_at + warned.at_s, 3),
        "at_s": _number(warned.at_s),
        "since_s": _number(warned.since_s),
        "until_s": _number(warned.until_s),
        "host": warned.host,
        "rank": warned.rank if warned.rank >= 0 else None,
        "sentence": warned.sentence,
        "causes": list(warned.causes),
        "became_failure": warned.is_failure,
    }


def _profile(shown: ShownProfile) -> dict[str, object]:
    return {
        "generation": shown.generation,
        "first_step": shown.first_step,
        "last_step": shown.last_step,
        "sentences": list(shown.sentences),
        "mfu": _number(shown.mfu),
        "gpu_busy": _number(shown.gpu_busy),
        "steps": [
            {
                "step": row.step,
                "seconds": _number(row.seconds),
                "computation_s": _number(row.computation_s),
                "communication_s": _number(row.communication_s),
                "exposed_s": _number(row.exposed_s),
                "overlap": _number(row.overlap),
            }
            for row in shown.steps
        ],
        "stragglers": [{"rank": each.rank, "times": each.times, "late_s": _number(each.late_s)} for each in shown.last],
    }


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
