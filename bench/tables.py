"""Tables in Markdown: any, those of a section's samples, and those of elaunch's stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.contenders import ELAUNCH
from bench.samples import Run, Sample, failures, summarize

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
    """Seconds, or another figure, with few digits: even three are more than the noise leaves."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def measured(results: Run, section: str, title: str, about: str, *, count: str = "workers") -> list[str]:
    """A row per number of workers (or what else `count` names), value and contender, and the reasons of failures."""
    rows, notes = [], []
    for workers in results.workers(section):
        taken = {contender: results.of(section, contender, workers) for contender in results.contenders(section)}
        for value in dict.fromkeys(name for each in taken.values() for s in each for name in s.values):
            figures = {
                name: summarize([s.values[value] for s in each if value in s.values]) for name, each in taken.items()
            }
            ours = figures.get(ELAUNCH.name)
            for contender, found in figures.items():
                if found is not None:
                    times = f"{found.median / ours.median:.2f}" if ours and ours.median else NOTHING
                    numbers = (seconds(each) for each in (found.median, found.p95, found.most))
                    rows.append((value, str(workers), contender, str(found.n), *numbers, times))
        notes += [f"- {workers} {count}, {name}: {why}" for name, each in taken.items() for why in failures(each)]
    heads = ("", count, "", "n", "median", "p95", "most", "× elaunch")
    parts = [f"### {title}\n\n{about}\n\n{table(heads, rows)}"] if rows else [f"### {title}"] if notes else []
    return [*parts, *(["Samples that failed:\n\n" + "\n".join(notes)] if notes else [])]


def stages(results: Run, section: str, since: str) -> list[str]:
    """Tables of elaunch's stages, one per number of workers."""
    parts = []
    for workers in results.workers(section):
        taken = [s for s in results.of(section, ELAUNCH.name, workers) if s.stages]
        if taken:
            heads = ("stage", f"since {since}: median s", "p95 s", "since the stage before: median s", "p95 s")
            title = f"#### Where elaunch's time goes: {section}, workers: {workers}, n = {len(taken)}"
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
