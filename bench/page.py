"""The tables of bench/results/README.md and of the terminal, from samples. Pure: text in, text out."""

from __future__ import annotations

from bench import launches, nodes, restarts, scale, statecost, staterestart, steady
from bench.samples import Run, failures, summarize
from bench.statetables import copies, pairs, restarts_beside
from bench.tables import NOTHING, seconds, stages, table, timed, without_a_time

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NODES_BEGIN, NODES_END = "<!-- bench:nodes:begin -->", "<!-- bench:nodes:end -->"
STATE_BEGIN, STATE_END = "<!-- bench:state:begin -->", "<!-- bench:state:end -->"
# The page has three parts: one node, several nodes, the training's state. One with samples is made anew.
NODES_SECTIONS = (nodes.SECTION, nodes.LOSS_SECTION, scale.FIRST, scale.RESTART)
STATE_SECTIONS = (staterestart.SECTION, statecost.SECTION, statecost.STEADY_SECTION)
# A new page, before its first tables.
EMPTY = (
    f"# Performance\n\nMeasured by `make bench`.\n\n{BEGIN}\n{END}\n\n"
    f"## Several nodes\n\n{NODES_BEGIN}\n{NODES_END}\n\n"
    f"## The training's state\n\n{STATE_BEGIN}\n{STATE_END}\n"
)
_FIRST = (
    "All agents start at once. The times are from then until the last one has its ranks, and until the first one has\n"
    "the table (sealed)."
)
_RESTART = (
    "The same times, from the death of one worker. Its agent is told and opens a generation. All agents stop their\n"
    "workers, join again, and are told of the sealed table."
)


def update(page: str, results: Run) -> str:
    """`page` with each part that has samples made anew. Raises ValueError if the markers of such a part are missing."""
    for begin, end, text in _parts(results):
        page = _replaced(page, begin, end, text)
    return page


def render(results: Run) -> str:
    """All tables."""
    return "\n".join(text for _, _, text in _parts(results))


def _parts(results: Run) -> list[tuple[str, str, str]]:
    """The parts that have samples: their markers, and their text."""
    there = {s.section for s in results.samples}
    parts = (
        (there - {*NODES_SECTIONS, *STATE_SECTIONS}, _one_node, BEGIN, END),
        (there & {*NODES_SECTIONS}, _nodes, NODES_BEGIN, NODES_END),
        (there & {*STATE_SECTIONS}, _state, STATE_BEGIN, STATE_END),
    )
    about = "\n".join(f"- {name}: {fact}" for name, fact in {**results.machine, **results.settings}.items())
    return [(begin, end, "\n\n".join([about, *make(results)]) + "\n") for found, make, begin, end in parts if found]


def _replaced(page: str, begin: str, end: str, text: str) -> str:
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"the page has no {begin} … {end}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _one_node(results: Run) -> list[str]:
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
        *_steady(results),
    ]


def _nodes(results: Run) -> list[str]:
    return [
        *timed(
            results,
            nodes.SECTION,
            "Restart on two nodes",
            "from SIGKILL of one worker on node A to the last rank's first all-reduce or optimizer step on A and B.",
        ),
        *timed(
            results,
            nodes.LOSS_SECTION,
            "Loss of a node",
            "from the end of the node's processes and link to the other ranks' first all-reduce or optimizer step.",
        ),
        *_many(results, scale.FIRST, "Many agents: first rendezvous", _FIRST),
        *_many(results, scale.RESTART, "Many agents: restart of all", _RESTART),
    ]


def _many(results: Run, section: str, title: str, about: str) -> list[str]:
    """A row for each number of agents."""
    rows, notes = [], []
    for agents in results.workers(section):
        taken = results.of(section, scale.NAME, agents)
        times = (summarize(results.values(section, scale.NAME, agents, name)) for name in (scale.RANKS, scale.SEALED))
        pairs = ((seconds(each.median), seconds(each.p95)) if each else (NOTHING, NOTHING) for each in times)
        rows.append([str(agents), str(sum(not s.why for s in taken)), *(cell for pair in pairs for cell in pair)])
        notes += [f"- {agents} agents: {failure}" for failure in failures(taken)]
    heads = ("agents", "n", f"{scale.RANKS}: median s", "p95 s", "sealed: median s", "p95 s")
    return [f"### {title}\n\n{about}\n\n{table(heads, rows)}", *without_a_time(notes)] if rows else []


def _state(results: Run) -> list[str]:
    return [*restarts_beside(results), *copies(results), *pairs(results)]


def _limits(results: Run) -> list[str]:
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


def _steady(results: Run) -> list[str]:
    """A column per contender: median (p95)."""
    section, contenders = steady.SECTION, results.contenders(steady.SECTION)
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
    return [f"### While 2 workers train\n\n{about}\n\n{table(('', *contenders), rows)}", *without_a_time(notes)]
