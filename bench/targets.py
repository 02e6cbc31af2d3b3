"""The promises of elaunch, and whether samples keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench import launches, nodes, restarts, scale, statecost, staterestart, steady
from bench.contenders import ELAUNCH, LIMIT_PRELOAD, TORCHRUN
from bench.samples import Results, Sample
from bench.stats import Summary, ratio, summarize

# Start-up: nobody can avoid the import of the preloaded modules. Each of torchrun's workers pays for it.
LIMIT_RATIO_MAX = 1.3
TORCHRUN_RATIO_MIN = 5.0
RESTART_MEDIAN_S_MAX, RESTART_P95_S_MAX = 0.25, 0.5
AGENT_RSS_MB_MAX, AGENT_CPU_MAX, AGENT_WAKE_UPS_MAX = 45.0, 0.2, 2.0
# Several nodes: a crash on one node, the loss of a node (its lease, and a second), many agents that start at once.
CRASH_MEDIAN_S_MAX, LOSS_S_MAX = 0.3, 4.0
RANKS_S_MAX = {64: 0.15, 1024: 2.0}
SEALED_S_MAX = {1024: 3.0}
# "Constant" allows that now and then an agent asks twice.
REQUESTS_RATIO_MAX = 1.25
# The training's state: steps that a failure loses, the cost of copies (% of the time).
STEPS_LOST_MAX, STEADY_COST_MAX = 0, 1.0
# With fewer samples a 95th percentile says little.
N_MIN = 20
_NOTHING = "nothing"


@dataclass(frozen=True)
class Verdict:
    """One promise: `what` was promised, the `target` and the `measured` value in words, and whether it was `kept`.

    `kept` is None if elaunch has a value, but the figure that it is compared with has none.
    """

    what: str
    target: str
    measured: str
    kept: bool | None


def verdicts(results: Results) -> list[Verdict]:
    """The verdicts on all promises that these samples can answer."""
    makers = (_start, _restart, _steady, _nodes, _many, _state)
    return [verdict for make in makers for verdict in make(results)]


def counted(taken: Sequence[Sample]) -> str:
    """The number of samples with a value, and of those that failed: "n = 17 (fewer than 20), 3 of 20 failed"."""
    failed = sum(bool(s.why) for s in taken)
    n = len(taken) - failed
    few = f" (fewer than {N_MIN})" if n < N_MIN else ""
    return f"n = {n}{few}" + (f", {failed} of {len(taken)} failed" if failed else "")


def _start(results: Results) -> Iterator[Verdict]:
    everyone = results.workers(launches.SECTION)
    # Two runs may come from two machines.
    alike = results.runs.get(launches.LIMIT_SECTION) is results.runs.get(launches.SECTION)
    limit = results.of(launches.LIMIT_SECTION, LIMIT_PRELOAD, 0) if alike else []
    for workers in everyone:
        ours = results.of(launches.SECTION, ELAUNCH.name, workers)
        theirs = results.of(launches.SECTION, TORCHRUN.name, workers)
        for name in (launches.ALL_REDUCE, launches.STEP):
            what = f"start → {name}, {_workers(workers)}"
            if ours and limit:
                times = ratio(_summary(ours, name), _summary(limit, launches.IMPORT))
                measured = f"{_times(times, 2)}; {counted(ours)}; the import's {counted(limit)}"
                kept = None if times is None else times <= LIMIT_RATIO_MAX
                yield _verdict(what, f"≤ {LIMIT_RATIO_MAX} × the import", measured, ours, kept)
            if ours and theirs and name == launches.STEP and workers == max(everyone):
                times = ratio(_summary(theirs, name), _summary(ours, name))
                measured = f"{_times(times, 1)}; {counted(ours)}; torchrun's {counted(theirs)}"
                kept = None if times is None else times >= TORCHRUN_RATIO_MIN
                yield _verdict(what, f"≥ {TORCHRUN_RATIO_MIN:g} × sooner than torchrun", measured, ours, kept)


def _restart(results: Results) -> Iterator[Verdict]:
    for workers in results.workers(restarts.SECTION):
        ours = results.of(restarts.SECTION, ELAUNCH.name, workers)
        if ours:
            summary = _summary(ours, launches.ALL_REDUCE)
            kept = summary and summary.median <= RESTART_MEDIAN_S_MAX and summary.p95 <= RESTART_P95_S_MAX
            measured = f"{summary.median:.3f} s, {summary.p95:.3f} s" if summary else _NOTHING
            what = f"SIGKILL → all-reduce again, {_workers(workers)}"
            target = f"median ≤ {RESTART_MEDIAN_S_MAX} s, p95 ≤ {RESTART_P95_S_MAX} s"
            yield _verdict(what, target, f"{measured}; {counted(ours)}", ours, bool(kept))


def _steady(results: Results) -> Iterator[Verdict]:
    rows: tuple[tuple[str, float, Callable[[float], str]], ...] = (
        (steady.AGENT_RSS, AGENT_RSS_MB_MAX, lambda value: f"{value:.1f} MB"),
        (steady.CPU, AGENT_CPU_MAX, lambda value: f"{value:.2f} %"),
        (steady.WAKE_UPS, AGENT_WAKE_UPS_MAX, lambda value: f"{value:.1f} /s"),
    )
    for section in (steady.SECTION, steady.TRAINER_SECTION):
        ours = results.of(section, ELAUNCH.name, steady.WORKERS)
        for name, limit, words in rows if ours else ():
            summary = _summary(ours, name)
            what = f"{name} while {steady.WORKERS} workers train"
            what += "" if section == steady.SECTION else " and report every step"
            measured = f"{words(summary.median) if summary else _NOTHING}; {counted(ours)}"
            kept = summary is not None and summary.median <= limit
            yield _verdict(what, f"median ≤ {words(limit)}", measured, ours, kept)


def _nodes(results: Results) -> Iterator[Verdict]:
    for section, what, most_s in (
        (nodes.SECTION, "SIGKILL on node A → all-reduce on A and B", CRASH_MEDIAN_S_MAX),
        (nodes.LOSS_SECTION, "node lost → all-reduce on the others", LOSS_S_MAX),
    ):
        for ranks in results.workers(section):
            ours = results.of(section, ELAUNCH.name, ranks)
            summary = _summary(ours, launches.ALL_REDUCE)
            if ours:
                measured = f"{summary.median:.3f} s, p95 {summary.p95:.3f} s" if summary else _NOTHING
                kept = summary is not None and summary.median <= most_s
                yield _verdict(what, f"median ≤ {most_s:g} s", f"{measured}; {counted(ours)}", ours, kept)


def _many(results: Results) -> Iterator[Verdict]:
    name = scale.ours("3.5")
    for milestone, limits in ((scale.SEALED, SEALED_S_MAX), (scale.RANKS, RANKS_S_MAX)):
        for agents, most_s in limits.items():
            ours = results.of(scale.FIRST, name, agents)
            summary = _summary(ours, milestone)
            if ours:
                measured = f"{summary.median:.3f} s; {counted(ours)}" if summary else f"{_NOTHING}; {counted(ours)}"
                kept = summary is not None and summary.median <= most_s
                yield _verdict(f"{agents} agents → {milestone}", f"median ≤ {most_s:g} s", measured, ours, kept)
    for section, what in ((scale.FIRST, "first rendezvous"), (scale.RESTART, "restart of all")):
        counts = [agents for agents in results.workers(section) if results.of(section, name, agents)]
        if len(counts) > 1:
            few, many = results.of(section, name, counts[0]), results.of(section, name, counts[-1])
            times = ratio(_summary(many, scale.REQUESTS), _summary(few, scale.REQUESTS))
            title = f"requests per agent, {what}: {counts[-1]} agents beside {counts[0]}"
            measured = f"{_times(times, 2)}; {counted(many)}"
            is_kept = None if times is None else times <= REQUESTS_RATIO_MAX
            yield _verdict(title, f"≤ {REQUESTS_RATIO_MAX:g} ×", measured, [*few, *many], is_kept)


def _state(results: Results) -> Iterator[Verdict]:
    what = "steps lost by the SIGKILL of a worker"
    for workers in results.workers(staterestart.SECTION):
        yield from _lost(results.of(staterestart.SECTION, ELAUNCH.name, workers), what)
    cost = f"median ≤ {STEADY_COST_MAX:g} %"
    for what, section, name in (
        ("snapshots of {} MB", statecost.SECTION, statecost.SHARE),
        ("the Keeper while a state of {} MB is trained", statecost.STEADY_SECTION, statecost.COST),
    ):
        for number in results.workers(section):
            taken = results.of(section, ELAUNCH.name, number)
            yield from _percent(taken, name, what.format(number), cost, lambda value: value <= STEADY_COST_MAX)


def _lost(ours: Sequence[Sample], what: str) -> Iterator[Verdict]:
    """The promise that no step is lost, if there are samples."""
    if ours:
        lost = [s.values[staterestart.LOST] for s in ours if staterestart.LOST in s.values]
        measured = f"{max(lost):g} at most; {counted(ours)}" if lost else f"{_NOTHING}; {counted(ours)}"
        yield _verdict(what, f"{STEPS_LOST_MAX}", measured, ours, bool(lost) and max(lost) <= STEPS_LOST_MAX)


def _percent(
    ours: Sequence[Sample], name: str, what: str, target: str, is_kept: Callable[[float], bool]
) -> Iterator[Verdict]:
    """A promise of a median in %, if there are samples."""
    if ours:
        summary = _summary(ours, name)
        measured = f"{summary.median:.2f} %; {counted(ours)}" if summary else f"{_NOTHING}; {counted(ours)}"
        yield _verdict(what, target, measured, ours, summary is not None and is_kept(summary.median))


def _verdict(what: str, target: str, measured: str, ours: Sequence[Sample], kept: bool | None) -> Verdict:
    # A failed sample has no time, so its median cannot show the failure. One failed sample breaks the promise.
    return Verdict(what, target, measured, False if any(s.why for s in ours) else kept)


def _summary(taken: Sequence[Sample], name: str) -> Summary | None:
    return summarize([s.values[name] for s in taken if name in s.values])


def _times(times: float | None, digits: int) -> str:
    return _NOTHING if times is None else f"{times:.{digits}f} ×"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
