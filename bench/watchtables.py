"""The tables about what a user is told, and what it costs to be watched."""

from __future__ import annotations

from bench import told, watching
from bench.samples import Results, failures
from bench.stats import ratio, summarize
from bench.tables import NOTHING, seconds, table, without_a_time

_TOLD = f"""\
{told.WORKERS} workers train, and a random rank fails at a random moment. The time is from the fault to the launcher's
first line that names a rank. "Right" counts the lines that name the rank that failed. After `exit 0` the other ranks
wait in an all-reduce. After an exception Python prints it and ends, which is most of the time. In an endless loop
nothing fails: elaunch sees that all ranks stand still (by default after 60 s), and torchrun says nothing."""
_WATCHING = f"""\
{watching.WORKERS} workers make {watching.STEPS} steps of a small model without a pause, and report each. The jobs take
turns. "Everything on" has log files, metrics, a command for events, and JSON lines; "everything off" has none, and no
detection of hangs. The cost is the ratio of the medians.

What else the machine does changes a step's time by more than elaunch does. So the CPU time of elaunch is counted as
well, as the scheduler counts it, in % of the time of the {watching.WORKERS} workers: that of elaunch's processes, of
its threads in a worker, and of `link.report`."""


def told_beside(results: Results) -> list[str]:
    """A table with a row per kind of failure and launcher."""
    rows = []
    contenders = results.contenders(told.SECTION)
    for how in (*told.HOWS, told.HUNG):
        for contender in contenders:
            taken = results.values(told.SECTION, contender, told.WORKERS, how)
            right = results.values(told.SECTION, contender, told.WORKERS, f"{how}: {told.RIGHT}")
            if found := summarize(taken):
                p95 = seconds(found.p95)
                rows.append(
                    (how, contender, str(found.n), seconds(found.median), p95, f"{sum(right):.0f} of {len(right)}")
                )
    if not rows:
        return []
    notes = [
        f"- {contender}: {failure}"
        for contender in contenders
        for failure in failures(results.of(told.SECTION, contender, told.WORKERS))
    ]
    heads = ("failure", "", "n", "median s", "p95 s", "right")
    return [f"### How soon a failure is told\n\n{_TOLD}\n\n{table(heads, rows)}", *without_a_time(notes)]


def cost_of_watching(results: Results) -> list[str]:
    """A table with a row per kind of step time."""
    section, names = watching.SECTION, (watching.WATCHED.name, watching.PLAIN.name)
    if section not in results.runs:
        return []
    rows = []
    for value in (watching.MEDIAN, watching.MEAN):
        on, off = (summarize(results.values(section, name, watching.WORKERS, value)) for name in names)
        times = ratio(on, off)
        cost = NOTHING if times is None else f"{100 * (times - 1):+.2f} %"
        cells = [f"{1000 * found.median:.3f}" if found else NOTHING for found in (on, off)]
        rows.append((value, str(min(found.n if found else 0 for found in (on, off))), *cells, cost))
    counted = []
    for value in (watching.PROCESSES, watching.THREADS, watching.REPORTS, watching.IN_ALL):
        on, off = (summarize(results.values(section, name, watching.WORKERS, value)) for name in names)
        if on and off:
            cells = [f"{share:.3f} %" for share in (on.median, on.p95, off.median, off.p95)]
            counted.append((value, str(min(on.n, off.n)), *cells))
    heads = ("", "n", "everything on: median ms", "everything off: median ms", "cost")
    kinds = ("share of the workers' time", "n", "on: median", "on: p95", "off: median", "off: p95")
    notes = [
        f"- {name}: {failure}" for name in names for failure in failures(results.of(section, name, watching.WORKERS))
    ]
    tables = [table(heads, rows), *([table(kinds, counted)] if counted else [])]
    return [f"### What watching costs\n\n{_WATCHING}", *tables, *without_a_time(notes)]
