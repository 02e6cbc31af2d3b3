"""What elaunch has promised, and whether these samples keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench import launches, restarts, steady
from bench.contenders import ELAUNCH, LIMIT_PRELOAD, TORCHRUN
from bench.samples import Results
from bench.stats import Summary, ratio, summarize

# Start-up: the import of what is preloaded cannot be avoided; torchrun's workers each pay it.
LIMIT_RATIO_MAX = 1.3
TORCHRUN_RATIO_MIN = 5.0
RESTART_MEDIAN_S_MAX, RESTART_P95_S_MAX = 0.25, 0.5
AGENT_RSS_MB_MAX, AGENT_CPU_MAX, AGENT_WAKE_UPS_MAX = 45.0, 0.2, 2.0


@dataclass(frozen=True)
class Verdict:
    """One promise: `what` was promised, the `target` and what was `measured` in words, and whether it was `kept`."""

    what: str
    target: str
    measured: str
    kept: bool


def verdicts(results: Results) -> list[Verdict]:
    """All promises that these samples can speak on."""
    return [*_start(results), *_restart(results), *_steady(results)]


def _summary(results: Results, section: str, contender: str, workers: int, name: str) -> Summary | None:
    return summarize(results.values(section, contender, workers, name))


def _start(results: Results) -> Iterator[Verdict]:
    limit = _summary(results, launches.LIMIT_SECTION, LIMIT_PRELOAD, 0, launches.IMPORT)
    everyone = results.workers(launches.SECTION)
    for workers in everyone:
        for name in (launches.ALL_REDUCE, launches.STEP):
            ours = _summary(results, launches.SECTION, ELAUNCH.name, workers, name)
            what = f"start → {name}, {_workers(workers)}"
            to_limit = ratio(ours, limit)
            if to_limit is not None:
                target = f"≤ {LIMIT_RATIO_MAX} × the import"
                yield Verdict(what, target, f"{to_limit:.2f} ×", to_limit <= LIMIT_RATIO_MAX)
            theirs = _summary(results, launches.SECTION, TORCHRUN.name, workers, name)
            sooner = ratio(theirs, ours)
            if sooner is not None and name == launches.STEP and workers == max(everyone):
                target = f"≥ {TORCHRUN_RATIO_MIN:g} × sooner than torchrun"
                yield Verdict(what, target, f"{sooner:.1f} ×", sooner >= TORCHRUN_RATIO_MIN)


def _restart(results: Results) -> Iterator[Verdict]:
    for workers in results.workers(restarts.SECTION):
        ours = _summary(results, restarts.SECTION, ELAUNCH.name, workers, launches.ALL_REDUCE)
        if ours:
            kept = ours.median <= RESTART_MEDIAN_S_MAX and ours.p95 <= RESTART_P95_S_MAX
            target = f"median ≤ {RESTART_MEDIAN_S_MAX} s, p95 ≤ {RESTART_P95_S_MAX} s"
            measured = f"{ours.median:.3f} s, {ours.p95:.3f} s"
            yield Verdict(f"SIGKILL → all-reduce again, {_workers(workers)}", target, measured, kept)


def _steady(results: Results) -> Iterator[Verdict]:
    rows: tuple[tuple[str, float, Callable[[float], str]], ...] = (
        (steady.AGENT_RSS, AGENT_RSS_MB_MAX, lambda value: f"{value:.1f} MB"),
        (steady.CPU, AGENT_CPU_MAX, lambda value: f"{value:.2f} %"),
        (steady.WAKE_UPS, AGENT_WAKE_UPS_MAX, lambda value: f"{value:.1f} /s"),
    )
    for section in (steady.SECTION, steady.TRAINER_SECTION):
        for name, limit, words in rows:
            ours = _summary(results, section, ELAUNCH.name, steady.WORKERS, name)
            if ours:
                what = f"{name} while {steady.WORKERS} workers train"
                what += "" if section == steady.SECTION else " and report every step"
                yield Verdict(what, f"median ≤ {words(limit)}", words(ours.median), ours.median <= limit)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
