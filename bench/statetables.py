"""The tables about the training's state: what a failure costs, and what copies cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bench import statecost, staterestart
from bench.marks import NEXT_STEP
from bench.samples import Run, Sample, Summary, failures, summarize
from bench.staterestart import WORKERS
from bench.tables import NOTHING, seconds, table, without_a_time

_RESTART = f"""\
{WORKERS} workers train the bundled model at its default size (a state of 10 MB). A random rank gets SIGKILL at a random
moment. k is the last step that any rank had completed. Steps lost are the steps up to k that had to be made again."""
_COPIES = f"""\
{statecost.WORKERS} workers train a stack of linear layers with AdamW. All copies go into shared memory. Host memory is
the peak need of the node's ranks, an older copy included. k is the number of steps between two snapshots, as the Keeper
chose it; the share is what the snapshots then cost."""
_PAIRS = f"""\
{statecost.WORKERS} workers train a stack of linear layers with 64 samples each, in turns with the Keeper and without.
Each n is a pair of turns of 40 steps, or of as many as the Keeper leaves between two snapshots if these are more. The
cost includes snapshots, the records of each step, and the question whether to stop."""


def restarts_beside(results: Run) -> list[str]:
    """Each side's lost steps and time to the first new step."""
    section = staterestart.SECTION
    sides = results.contenders(section)
    if not sides:
        return []
    taken = {side: results.of(section, side, WORKERS) for side in sides}
    heads = ("", "n", "steps lost: median", "most", f"{NEXT_STEP}: median s", "p95 s")
    rows = [
        (side, _n(taken[side]), *_lost(taken[side]), *_two(_summary(taken[side], NEXT_STEP), seconds)) for side in sides
    ]
    notes = _notes(sides, lambda side: taken[side])
    return [f"### A worker is killed\n\n{_RESTART}\n\n{table(heads, rows)}", *without_a_time(notes)]


def copies(results: Run) -> list[str]:
    """A table with a row per size and way of copying."""
    section = statecost.SECTION
    heads = (
        *("state, MB", "", "n", f"{statecost.HELD}: median s", "p95 s", f"{statecost.WHOLE} s"),
        *("k", "step s", f"{statecost.SHARE}, %", f"{statecost.MEMORY}, MB"),
    )
    rows, notes = [], []
    for size_mb in results.workers(section):
        for way in results.contenders(section):
            taken = results.of(section, way, size_mb)
            notes += [f"- {size_mb} MB, {way}: {failure}" for failure in failures(taken)]
            if not any(s.values for s in taken):
                continue
            rows.append(
                (
                    *(str(size_mb), way, _n(taken), *_two(_summary(taken, statecost.HELD), seconds)),
                    _one(_summary(taken, statecost.WHOLE), seconds),
                    _one(_summary(taken, statecost.EVERY), lambda value: f"{value:.0f}"),
                    _one(_summary(taken, statecost.STEP), seconds),
                    _one(_summary(taken, statecost.SHARE), lambda value: f"{value:.2f}"),
                    _one(_summary(taken, statecost.MEMORY), lambda value: f"{value:,.0f}"),
                )
            )
    if not rows and not notes:
        return []
    return [f"### Copies of the state\n\n{_COPIES}\n\n{table(heads, rows)}", *without_a_time(notes)]


def pairs(results: Run) -> list[str]:
    """A table with a row per size: the Keeper's cost while nothing fails."""
    section = statecost.STEADY_SECTION
    steps = (statecost.PLAIN, statecost.PLAIN_P95, statecost.KEPT, statecost.KEPT_P95)
    heads = ("state, MB", "n", *(f"{name}: median s" for name in steps), f"{statecost.COST}: median %", "p95 %")
    rows, notes = [], []
    for size_mb in results.workers(section):
        taken = results.of(section, statecost.KEEPER, size_mb)
        notes += [f"- {size_mb} MB: {failure}" for failure in failures(taken)]
        if any(s.values for s in taken):
            times = (_one(_summary(taken, name), lambda value: f"{value:.4f}") for name in steps)
            cost = _two(_summary(taken, statecost.COST), lambda value: f"{value:.2f}")
            rows.append((str(size_mb), _n(taken), *times, *cost))
    if not rows and not notes:
        return []
    return [f"### The Keeper while nothing fails\n\n{_PAIRS}\n\n{table(heads, rows)}", *without_a_time(notes)]


def _summary(taken: Iterable[Sample], name: str) -> Summary | None:
    return summarize([s.values[name] for s in taken if name in s.values])


def _n(taken: Iterable[Sample]) -> str:
    return str(sum(not s.why for s in taken))


def _lost(taken: Iterable[Sample]) -> tuple[str, str]:
    lost = [s.values[staterestart.LOST] for s in taken if staterestart.LOST in s.values]
    summary = summarize(lost)
    return (f"{summary.median:g}", f"{max(lost):g}") if summary else (NOTHING, NOTHING)


def _one(summary: Summary | None, words: Callable[[float], str]) -> str:
    return words(summary.median) if summary else NOTHING


def _two(summary: Summary | None, words: Callable[[float], str]) -> tuple[str, str]:
    return (words(summary.median), words(summary.p95)) if summary else (NOTHING, NOTHING)


def _notes(sides: Sequence[str], taken: Callable[[str], list[Sample]]) -> list[str]:
    return [f"- {side}: {failure}" for side in sides for failure in failures(taken(side))]
