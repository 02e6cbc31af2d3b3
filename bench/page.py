"""The tables of bench/results/README.md and of the terminal, from samples. Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench import launches, nodes, restarts, scale, statecost, staterestart, steady, warm
from bench.manytables import idle, rendezvous
from bench.samples import Results, failures, subset
from bench.statetables import copies, pairs, restarts_beside
from bench.stats import summarize
from bench.tables import NOTHING, seconds, stages, table, timed, without_a_time

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NODES_BEGIN, NODES_END = "<!-- bench:nodes:begin -->", "<!-- bench:nodes:end -->"
STATE_BEGIN, STATE_END = "<!-- bench:state:begin -->", "<!-- bench:state:end -->"
# The page has three parts: one node, several nodes, the training's state. One with samples is made anew.
NODES_SECTIONS = (nodes.SECTION, nodes.LOSS_SECTION, scale.FIRST, scale.RESTART, scale.IDLE)
STATE_SECTIONS = (staterestart.SECTION, statecost.SECTION, statecost.STEADY_SECTION)
# A new page, before its first tables.
EMPTY = (
    f"# Performance\n\nMeasured by `make bench`.\n\n{BEGIN}\n{END}\n\n"
    f"## Several nodes\n\n{NODES_BEGIN}\n{NODES_END}\n\n"
    f"## The training's state\n\n{STATE_BEGIN}\n{STATE_END}\n"
)
_MACHINE = ("CPUs", "memory", "kernel")
_FIRST = (
    "All agents start at once. The times are from then until the first agent has the table (sealed), and until the\n"
    "last one has it (all have ranks). Requests, and the bytes of bodies in both directions, are counted at the\n"
    "clients, without requests by the clock: an agent renews its lease each 0.8 s, and once per lease time (3 s) it\n"
    "looks whether it has seen all keys. etcd's own count includes these looks; a longer round has more of them. CPU\n"
    "is that of the whole round."
)
_RESTART = (
    "The same times, from the death of one worker. Its agent is told and opens a generation. All agents stop their\n"
    "workers, join again, and are told of the sealed table."
)
_IDLE = f"Medians of windows of {scale.IDLE_S:g} s. A window has a whole number of renewals and of looks."


def update(page: str, results: Results) -> str:
    """`page` with each part that has samples made anew. Raises ValueError if the markers of such a part are missing."""
    for part in _parted(results):
        page = _replaced(page, part.begin, part.end, _text(part))
    return page


def render(results: Results) -> str:
    """All tables."""
    return "\n".join(_text(part) for part in _parted(results))


@dataclass(frozen=True)
class _Part:
    """A part of the page: its samples, the function that makes its tables, and its markers."""

    results: Results
    make: Callable[[Results], list[str]]
    begin: str
    end: str


def _parted(results: Results) -> list[_Part]:
    """The parts that have samples."""
    other = (*NODES_SECTIONS, *STATE_SECTIONS)
    parts = (
        _Part(subset(results, lambda s: s not in other), _one_node, BEGIN, END),
        _Part(subset(results, lambda s: s in NODES_SECTIONS), _nodes, NODES_BEGIN, NODES_END),
        _Part(subset(results, lambda s: s in STATE_SECTIONS), _state, STATE_BEGIN, STATE_END),
    )
    return [part for part in parts if part.results.samples]


def _replaced(page: str, begin: str, end: str, text: str) -> str:
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page has no {begin} … {end}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _text(part: _Part) -> str:
    return "\n\n".join([*_about(part.results), *part.make(part.results)]) + "\n"


def _one_node(results: Results) -> list[str]:
    return [
        *timed(
            results,
            launches.SECTION,
            "Start",
            "from the command to the last rank's first all-reduce or optimizer step.",
        ),
        *stages(results, launches.SECTION, "the command"),
        *_limits(results),
        *timed(
            results,
            restarts.SECTION,
            "Restart",
            "from SIGKILL of one worker to the last rank's first all-reduce or optimizer step of the new generation.",
        ),
        *stages(results, restarts.SECTION, "the kill"),
        *timed(results, launches.LINE_SECTION, "First line", "from the command to one worker's first line. No torch."),
        *timed(
            results,
            warm.SECTION,
            "First line after a run",
            "from the command to the first line of one worker, after `import torch`. A run with `--warm` came before"
            " each turn.",
        ),
        *_steady(results, steady.SECTION, "While 2 workers train"),
        *_steady(results, steady.TRAINER_SECTION, "While 2 workers train with the bundled trainer"),
    ]


def _nodes(results: Results) -> list[str]:
    return [
        *timed(
            results,
            nodes.SECTION,
            "Restart on two nodes",
            "from SIGKILL of one worker on node A to the last rank's first all-reduce or optimizer step on A and B.",
        ),
        *stages(results, nodes.SECTION, "the kill"),
        *timed(
            results,
            nodes.LOSS_SECTION,
            "Loss of a node",
            "from the end of the node's processes and link to the other ranks' first all-reduce or optimizer step.",
        ),
        *stages(results, nodes.LOSS_SECTION, "the loss"),
        *rendezvous(results, scale.FIRST, "Many agents: first rendezvous", _FIRST),
        *rendezvous(results, scale.RESTART, "Many agents: restart of all", _RESTART),
        *idle(results, "Many agents: while they train", _IDLE),
    ]


def _state(results: Results) -> list[str]:
    return [*restarts_beside(results), *copies(results), *pairs(results)]


def _about(results: Results) -> Iterator[str]:
    """The facts that all runs share; then each run's sections, with the facts in which the run differs."""
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
        yield "**The runs are from different machines. Compare figures within a section only.**"


def _limits(results: Results) -> list[str]:
    rows, notes = [], []
    for name in results.contenders(launches.LIMIT_SECTION):
        taken = results.of(launches.LIMIT_SECTION, name, 0)
        summary = summarize(results.values(launches.LIMIT_SECTION, name, 0, launches.IMPORT))
        cells = (seconds(summary.median), seconds(summary.p95)) if summary else (NOTHING, NOTHING)
        rows.append((name, str(summary.n if summary else 0), *cells))
        notes += [f"- {name}: {failure}" for failure in failures(taken)]
    if not rows:
        return []
    part = f"### The limit: a bare interpreter's import\n\n{table(('', 'n', 'median s', 'p95 s'), rows)}"
    return [part, *without_a_time(notes)]


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
            row.append(f"{summary.median:.2f} ({summary.p95:.2f})" if summary else NOTHING)
        rows.append(row)
    notes = [f"- {contender}: {failure}" for contender in contenders for failure in failures(taken[contender])]
    about = (
        f"Median (p95) of n windows of {steady.WINDOW_S:g} s, one after the other in one job of each contender. "
        "So the p95 is of windows, not of jobs.\n"
        "The contenders do not take turns here, so a slow minute affects only one of them.\n"
        '"Launcher in all" is the sum of all its processes except the workers.'
    )
    return [f"### {title}\n\n{about}\n\n{table(('', *contenders), rows)}", *(["\n".join(notes)] if notes else [])]
