"""The tables of docs/performance.md and of the terminal, from samples. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from bench import chatty, launches, restarts, steady
from bench.contenders import ELAUNCH
from bench.samples import Results, Sample, failures
from bench.stats import Summary, ratio, summarize
from bench.targets import verdicts

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
# What a page is before anything was written to it.
EMPTY = f"# Performance\n\nMeasured by `make bench`.\n\n{BEGIN}\n{END}\n"
_NOTHING = "–"
_MACHINE = ("CPUs", "memory", "kernel")


def update(page: str, results: Results) -> str:
    """`page` with everything between its two markers made anew. Raises ValueError where it has not both."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{render(results)}\n{END}{after}"


def render(results: Results) -> str:
    """All tables."""
    parts = [
        *_about(results),
        *_promises(results),
        *_timed(results, launches.SECTION, "Start", "from the command to the last rank's first …"),
        *_stages(results, launches.SECTION, "the command"),
        *_limits(results),
        *_timed(results, restarts.SECTION, "Restart", "from SIGKILL of one worker to the last rank's first …"),
        *_stages(results, restarts.SECTION, "the kill"),
        *_timed(results, launches.LINE_SECTION, "First line", "from the command to one worker's … without torch"),
        *_steady(results, steady.SECTION, "While 2 workers train"),
        *_steady(results, steady.TRAINER_SECTION, "While 2 workers train with the bundled trainer"),
        *_rates(results),
    ]
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown whose columns also stand in line as they are; the first is text, the others are numbers."""
    lines = (heads, *rows)
    # A Markdown rule has three characters at least.
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in lines
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (aligned[0], rules, *aligned[1:]))


def seconds(value: float) -> str:
    """Three digits are more than the noise leaves."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _about(results: Results) -> Iterator[str]:
    """What all runs have in common, and of each run its sections and what sets it apart."""
    sections: dict[int, list[str]] = {}
    for section, run in results.runs.items():
        sections.setdefault(id(run), []).append(section)
    facts = {id(run): {**run.machine, **run.settings} for run in results.runs.values()}
    names = list(dict.fromkeys(name for of_run in facts.values() for name in of_run))
    apart = [name for name in names if len({of_run.get(name) for of_run in facts.values()}) > 1]
    # Without a sample there is no run.
    for common in list(facts.values())[:1]:
        yield "\n".join(f"- {name}: {common[name]}" for name in names if name not in apart)
    if apart:
        lines = [
            f"- {', '.join(f'`{section}`' for section in sections[run])}: "
            + "; ".join(f"{name} {facts[run][name]}" for name in apart if name in facts[run])
            for run in facts
        ]
        yield "The sections come from several runs:\n\n" + "\n".join(lines)
    if set(apart) & set(_MACHINE):
        yield "**Not all of them on the same machine: compare within a section only.**"


def _promises(results: Results) -> list[str]:
    kept = {True: "yes", False: "**no**", None: _NOTHING}
    rows = [(v.what, v.target, v.measured, kept[v.kept]) for v in verdicts(results)]
    return ["### Promises\n\n" + table(("what", "target", "measured", "kept"), rows)] if rows else []


def _timed(results: Results, section: str, title: str, what: str) -> list[str]:
    """A table per number of workers; a row per contender: its n, and of each value median, p95, ratio to elaunch."""
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
                row += _cells(summarize(results.values(section, contender, workers, name)), ours, seconds)
            rows.append(row)
            notes += [f"- {contender}: {failure}" for failure in failures(taken)]
        count = "1 worker" if workers == 1 else f"{workers} workers"
        parts += [f"### {title}, {count}\n\nTime {what}\n\n{table(heads, rows)}", *_without_a_time(notes)]
    return parts


def _without_a_time(notes: Sequence[str]) -> list[str]:
    return ["Without a time:\n\n" + "\n".join(notes)] if notes else []


def _cells(summary: Summary | None, ours: Summary | None, words: Callable[[float], str]) -> list[str]:
    if summary is None:
        return [_NOTHING] * 3
    times = ratio(summary, ours)
    return [words(summary.median), words(summary.p95), _NOTHING if times is None else f"{times:.2f}"]


def _stages(results: Results, section: str, since: str) -> list[str]:
    """elaunch's stages, a table per number of workers."""
    parts = []
    for workers in results.workers(section):
        taken = [s for s in results.of(section, ELAUNCH.name, workers) if s.stages]
        if taken:
            heads = ("stage", f"since {since}: median s", "p95 s", "since the stage before: median s", "p95 s")
            count = "1 worker" if workers == 1 else f"{workers} workers"
            rows = stage_rows(taken)
            parts.append(
                f"#### Where elaunch's time goes: {section}, {count}, n = {len(taken)}\n\n{table(heads, rows)}"
            )
    return parts


def stage_rows(taken: Sequence[Sample]) -> list[tuple[str, ...]]:
    """A row per stage, in the order of the medians; a sample without a stage is left out of that row and the next."""
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
        cells = (step.median, step.p95) if step else ()
        rows.append((name, *(seconds(v) for v in (times[name].median, times[name].p95, *cells))))
    return rows


def _limits(results: Results) -> list[str]:
    rows, notes = [], []
    for name in results.contenders(launches.LIMIT_SECTION):
        taken = results.of(launches.LIMIT_SECTION, name, 0)
        summary = summarize(results.values(launches.LIMIT_SECTION, name, 0, launches.IMPORT))
        cells = (seconds(summary.median), seconds(summary.p95)) if summary else (_NOTHING, _NOTHING)
        rows.append((name, str(summary.n if summary else 0), *cells))
        notes += [f"- {name}: {failure}" for failure in failures(taken)]
    if not rows:
        return []
    part = f"### The limit: a bare interpreter's import\n\n{table(('', 'n', 'median s', 'p95 s'), rows)}"
    return [part, *_without_a_time(notes)]


def _steady(results: Results, section: str, title: str) -> list[str]:
    """A column per contender: median (p95)."""
    contenders = results.contenders(section)
    if not contenders:
        return []
    cpu, wake_ups = "% of one CPU", "per second"
    units = {
        steady.CPU: cpu,
        steady.ALL_CPU: cpu,
        steady.WAKE_UPS: wake_ups,
        steady.ALL_WAKE_UPS: wake_ups,
    }
    names = list(dict.fromkeys(n for s in results.samples if s.section == section for n in s.values))
    taken = {contender: results.of(section, contender, steady.WORKERS) for contender in contenders}
    rows = [["n", *(str(sum(not s.why for s in taken[contender])) for contender in contenders)]]
    for name in names:
        row = [f"{name}, {units.get(name, 'MB')}"]
        for contender in contenders:
            summary = summarize(results.values(section, contender, steady.WORKERS, name))
            row.append(f"{summary.median:.2f} ({summary.p95:.2f})" if summary else _NOTHING)
        rows.append(row)
    notes = [f"- {contender}: {failure}" for contender in contenders for failure in failures(taken[contender])]
    about = (
        f"Median (p95) of n windows of {steady.WINDOW_S:g} s, one after the other in one job of each: "
        "the p95 is of windows, not of jobs.\n"
        "The contenders do not take turns here: a slow minute strikes one of them.\n"
        "The launcher in all: the sum of its processes that are not workers."
    )
    return [f"### {title}\n\n{about}\n\n{table(('', *contenders), rows)}", *(["\n".join(notes)] if notes else [])]


def _rates(results: Results) -> list[str]:
    section, workers, name = chatty.SECTION, chatty.WORKERS, chatty.RATE
    ours = summarize(results.values(section, ELAUNCH.name, workers, name))
    rows, notes = [], []
    for contender in results.contenders(section):
        values = results.values(section, contender, workers, name)
        # The slow end of a rate is its low one.
        slow = summarize([-value for value in values])
        summary = summarize(values)
        times = ratio(summary, ours)
        torn = summarize(results.values(section, contender, workers, chatty.TORN))
        if summary and slow and torn:
            cells = (
                f"{summary.median:,.0f}",
                f"{-slow.p95:,.0f}",
                _NOTHING if times is None else f"{times:.2f}",
                f"{torn.median:,.0f}",
            )
            rows.append((contender, str(summary.n), *cells))
        notes += [f"- {contender}: {failure}" for failure in failures(results.of(section, contender, workers))]
    if not rows and not notes:
        return []
    about = f"{workers} workers print {chatty.LINES:,} lines of 80 characters each"
    about += "; from the first print to the last line at the reader."
    heads = ("", "n", "median lines/s", "p5 lines/s", "× elaunch", "torn lines: median")
    return [f"### Chatty workers\n\n{about}\n\n{table(heads, rows)}", *(["\n".join(notes)] if notes else [])]
