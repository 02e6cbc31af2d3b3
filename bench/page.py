"""The tables of bench/results/README.md and of the terminal, from samples. Pure: text in, text out."""

from __future__ import annotations

from bench import launches, nodes, restarts, scale, statecost, staterestart, steady
from bench.samples import Run
from bench.tables import measured, stages

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
    "The same times, from the death of one worker. Its agent is told and opens a generation. All agents stop their\n"
    "workers, join again, and are told of the sealed table."
)
_KILLED = (
    "The bundled model trains at its default size (a state of 10 MB). A random rank gets SIGKILL at a random moment.\n"
    "k is the last step that any rank had completed. Steps lost are the steps up to k that had to be made again."
)
_PAIRS = (
    f"{statecost.WORKERS} workers train a stack of linear layers with 64 samples each, in turns with the Keeper and\n"
    "without. Each n is a pair of turns of 40 steps, or of as many as the Keeper leaves between two snapshots if\n"
    "these are more. The cost includes snapshots, the records of each step, and the question whether to stop."
)


def update(page: str, results: Run) -> str:
    """`page` with each part that has samples made anew. Raises ValueError if the markers of such a part are missing."""
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
        *measured(results, launches.SECTION, "Start", f"{start}."),
        *stages(results, launches.SECTION, "the command"),
        *measured(results, launches.LIMIT_SECTION, "The limit: a bare interpreter's import", "s"),
        *measured(results, restarts.SECTION, "Restart", f"{_AGAIN} of the new generation."),
        *stages(results, restarts.SECTION, "the kill"),
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
        *measured(results, staterestart.SECTION, "A worker is killed", _KILLED),
        *measured(results, statecost.SECTION, "The Keeper while nothing fails", _PAIRS, count="MB"),
    ]
