"""The tables of bench/results/README.md and of the terminal, from samples. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench import launches, nodes, scale, state, steady
from bench.job import ELAUNCH
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


BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NODES_BEGIN, NODES_END = "<!-- bench:nodes:begin -->", "<!-- bench:nodes:end -->"
STATE_BEGIN, STATE_END = "<!-- bench:state:begin -->", "<!-- bench:state:end -->"
# A new page, before its first tables.
EMPTY = (
    f"# Performance\n\nMeasured by `make bench`.\n\n{BEGIN}\n{END}\n\n"
    f"## Several nodes\n\n{NODES_BEGIN}\n{NODES_END}\n\n"
    f"## The training's state\n\n{STATE_BEGIN}\n{STATE_END}\n"
)
_AGAIN = "s from SIGKILL of one worker to the last rank's first all-reduce or optimizer step"
_STEADY = (
    f"Windows of {steady.WINDOW_S:g} s, one after the other in one job of each contender. So the p95 is of windows,\n"
    "not of jobs. The contenders do not take turns here, so a slow minute affects only one of them.\n"
    '"Launcher in all" is the sum of all its processes except the workers.'
)
_FIRST = (
    "All agents start at once. Seconds from then until the last one has its ranks, and until the first one has\n"
    "the table (sealed)."
)
_RESTART = (
    "The same times, from the death of one worker. Its agent is notified and opens a generation. All agents stop\n"
    "their workers, join again, and are notified of the sealed table."
)
_KILLED = (
    "The bundled model trains at its default size (a state of 10 MB). A random rank gets SIGKILL at a random moment.\n"
    "k is the last step that any rank had completed. Steps lost are the steps up to k that had to be made again."
)
_PAIRS = (
    f"{state.COST_WORKERS} workers train a stack of linear layers with 64 samples each, in turns with the Keeper and\n"
    "without. Each n is a pair of turns of 100 steps, or of as many as the Keeper leaves between two snapshots if\n"
    "these are more. The cost includes snapshots, the records of each step, and the question whether to stop."
)


def update(page: str, results: Run) -> str:
    """`page` with each part that has samples replaced. Raises ValueError if the markers of such a part are missing."""
    for begin, end, text in _parts(results):
        page = replaced(page, begin, end, text)
    return page


def render(results: Run) -> str:
    """All tables."""
    return "\n".join(text for _, _, text in _parts(results))


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """`page` with `text` between the markers. Raises ValueError if they are missing."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page has no {begin} … {end}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _parts(results: Run) -> list[tuple[str, str, str]]:
    """The parts that have samples: their markers, and their text."""
    parts = ((BEGIN, END, _one_node), (NODES_BEGIN, NODES_END, _nodes), (STATE_BEGIN, STATE_END, _state))
    about = "\n".join(f"- {name}: {fact}" for name, fact in {**results.machine, **results.settings}.items())
    made = [(begin, end, make(results)) for begin, end, make in parts]
    return [(begin, end, "\n\n".join([about, *tables]) + "\n") for begin, end, tables in made if tables]


def _one_node(results: Run) -> list[str]:
    start = "s from the command to the last rank's first all-reduce or optimizer step"
    first_line = "s from the command to one worker's first line. No torch."
    return [
        *measured(results, launches.START, "Start", f"{start}."),
        *stages(results, launches.START, "the command"),
        *measured(results, launches.LIMIT_SECTION, "The limit: a bare interpreter's import", "s"),
        *measured(results, launches.RESTART, "Restart", f"{_AGAIN} of the new generation."),
        *stages(results, launches.RESTART, "the kill"),
        *measured(results, launches.LINE_SECTION, "First line", first_line),
        *measured(results, steady.SECTION, f"While {steady.WORKERS} workers train", _STEADY),
    ]


def _nodes(results: Run) -> list[str]:
    lost = "s from the end of the node's processes and link to the other ranks' first all-reduce or optimizer step."
    return [
        *measured(results, nodes.SECTION, "Restart on two nodes", f"{_AGAIN} on both nodes."),
        *measured(results, nodes.LOSS_SECTION, "Loss of a node", lost),
        *measured(results, scale.FIRST, "Many agents: first rendezvous", _FIRST, count="agents"),
        *measured(results, scale.RESTART, "Many agents: restart of all", _RESTART, count="agents"),
    ]


def _state(results: Run) -> list[str]:
    return [
        *measured(results, state.RESTART_SECTION, "A worker is killed", _KILLED),
        *measured(results, state.COST_SECTION, "The Keeper while nothing fails", _PAIRS, count="MB"),
    ]
