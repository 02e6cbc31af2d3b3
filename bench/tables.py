"""Tables in Markdown, and the tables that several sections share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from bench.contenders import ELAUNCH
from bench.samples import Run, Sample, Summary, failures, ratio, summarize

NOTHING = "–"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, also aligned as plain text. The first column is text, the others are numbers."""
    lines = (heads, *rows)
    # The rule below a Markdown heading has at least three characters.
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in lines
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (aligned[0], rules, *aligned[1:]))


def seconds(value: float) -> str:
    """Seconds with few digits: even three are more than the noise leaves."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def timed(results: Run, section: str, title: str, what: str) -> list[str]:
    """A table per number of workers, a row per contender: n, then median, p95 and ratio to elaunch of each value."""
    parts = []
    for workers in results.workers(section):
        names = list(dict.fromkeys(n for s in results.samples if s.section == section for n in s.values))
        heads = ["", "n", *(head for name in names for head in (f"{name}: median s", "p95 s", "× elaunch"))]
        rows, notes = [], []
        for contender in results.contenders(section):
            taken = results.of(section, contender, workers)
            if not taken:
                continue
            row = [contender, str(sum(not s.why for s in taken))]
            for name in names:
                ours = summarize(results.values(section, ELAUNCH.name, workers, name))
                row += cells(summarize(results.values(section, contender, workers, name)), ours, seconds)
            rows.append(row)
            notes += [f"- {contender}: {failure}" for failure in failures(taken)]
        parts += [f"### {title}, {count(workers)}\n\nTime {what}\n\n{table(heads, rows)}", *without_a_time(notes)]
    return parts


def count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def without_a_time(notes: Sequence[str]) -> list[str]:
    """A paragraph about the samples that failed, if there are any."""
    return ["Samples that failed:\n\n" + "\n".join(notes)] if notes else []


def cells(summary: Summary | None, ours: Summary | None, words: Callable[[float], str]) -> list[str]:
    """Median, p95 and ratio to elaunch's median."""
    if summary is None:
        return [NOTHING] * 3
    times = ratio(summary, ours)
    return [words(summary.median), words(summary.p95), NOTHING if times is None else f"{times:.2f}"]


def stages(results: Run, section: str, since: str) -> list[str]:
    """Tables of elaunch's stages, one per number of workers."""
    parts = []
    for workers in results.workers(section):
        taken = [s for s in results.of(section, ELAUNCH.name, workers) if s.stages]
        if taken:
            heads = ("stage", f"since {since}: median s", "p95 s", "since the stage before: median s", "p95 s")
            title = f"#### Where elaunch's time goes: {section}, {count(workers)}, n = {len(taken)}"
            parts.append(f"{title}\n\n{table(heads, stage_rows(taken))}")
    return parts


def stage_rows(taken: Sequence[Sample]) -> list[tuple[str, ...]]:
    """A row per stage, in the order of the medians. A sample without a stage is missing in that row and the next."""
    named: Mapping[str, list[float]] = {
        name: [s.stages[name] for s in taken if name in s.stages]
        for name in dict.fromkeys(n for s in taken for n in s.stages)
    }
    times = {name: summary for name, values in named.items() if (summary := summarize(values))}
    order = sorted(times, key=lambda name: times[name].median)
    rows = []
    for before, name in zip((None, *order), order, strict=False):
        steps = [
            s.stages[name] - (s.stages[before] if before else 0)
            for s in taken
            if {name, before or name} <= s.stages.keys()
        ]
        step = summarize(steps)
        two = (step.median, step.p95) if step else ()
        rows.append((name, *(seconds(v) for v in (times[name].median, times[name].p95, *two))))
    return rows
