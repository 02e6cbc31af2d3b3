"""Tables of what many agents cost: a row for each number of agents and each store."""

from __future__ import annotations

from bench import scale
from bench.samples import Results, failures
from bench.stats import summarize
from bench.tables import NOTHING, seconds, table, without_a_time


def rendezvous(results: Results, section: str, title: str, about: str) -> list[str]:
    """A table of times, and of what one round costs."""
    heads = (
        *("agents", "", "n", f"{scale.RANKS}: median s", "p95 s", "sealed: median s"),
        *(scale.REQUESTS, scale.SEEN, scale.BYTES, f"{scale.AGENTS_CPU}, s", f"{scale.ETCD_CPU}, s"),
    )
    rows, notes = [], []
    for agents, name in _who(results, section):
        taken = results.of(section, name, agents)
        row = [str(agents), name, str(sum(not s.why for s in taken))]
        ranks = summarize(results.values(section, name, agents, scale.RANKS))
        row += [seconds(ranks.median), seconds(ranks.p95)] if ranks else [NOTHING] * 2
        row.append(_median(results, section, name, agents, scale.SEALED, ".3f"))
        row += _costs(results, section, name, agents, ".2f")
        rows.append(row)
        notes += [f"- {agents} agents, {name}: {failure}" for failure in failures(taken)]
    return [f"### {title}\n\n{about}\n\n{table(heads, rows)}", *without_a_time(notes)] if rows else []


def idle(results: Results, title: str, about: str) -> list[str]:
    """A table of what agents cost while they train."""
    percent = "% of one CPU"
    heads = (
        *("agents", "", "n", "requests/s per agent", "seen by etcd", "bytes/s per agent"),
        *(f"{scale.AGENTS_CPU}, {percent}", f"{scale.ETCD_CPU}, {percent}"),
    )
    rows, notes = [], []
    for agents, name in _who(results, scale.IDLE):
        taken = results.of(scale.IDLE, name, agents)
        row = [str(agents), name, str(sum(not s.why for s in taken))]
        rows.append(row + _costs(results, scale.IDLE, name, agents, ".1f"))
        notes += [f"- {agents} agents, {name}: {failure}" for failure in failures(taken)]
    return [f"### {title}\n\n{about}\n\n{table(heads, rows)}", *without_a_time(notes)] if rows else []


def _who(results: Results, section: str) -> list[tuple[int, str]]:
    pairs = ((agents, name) for agents in results.workers(section) for name in results.contenders(section))
    return [(agents, name) for agents, name in pairs if results.of(section, name, agents)]


def _costs(results: Results, section: str, name: str, agents: int, cpu: str) -> list[str]:
    forms = {scale.REQUESTS: ".2f", scale.SEEN: ".2f", scale.BYTES: ",.0f", scale.AGENTS_CPU: cpu, scale.ETCD_CPU: cpu}
    return [_median(results, section, name, agents, value, form) for value, form in forms.items()]


def _median(results: Results, section: str, name: str, agents: int, value: str, form: str) -> str:
    summary = summarize(results.values(section, name, agents, value))
    return f"{summary.median:{form}}" if summary else NOTHING
