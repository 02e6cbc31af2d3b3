"""A status record in words: lines of facts, and one table of ranks or nodes. Pure; for `status` and for `top`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.texts import bytes_text, plain

# More ranks than this are shown by node, unless --ranks asks for them.
RANKS_SHOWN = 32
# More hosts than these have their memory and load in the table of nodes alone.
_HOSTS_SAID = 4
_HINT = "elaunch status --ranks shows each rank"

Rows = list[tuple[str, ...]]


def text_of(record: dict[str, Any], *, every_rank: bool = False) -> str:
    """The record as `elaunch status` prints it."""
    facts = facts_of(record)
    width = max(len(label) for label, _ in facts)
    lines = [headline(record), *(f"  {label:{width}}  {text}" for label, text in facts)]
    if rows := rows_of(record, every_rank=every_rank):
        lines += ["", *aligned(rows)]
    lines += remarks(record)
    return "\n".join(lines) + "\n"


def headline(record: dict[str, Any]) -> str:
    """The job in one line."""
    generation, outcome = record["generation"], record["outcome"]
    state = record["state"]
    name = job_name(record["run_id"])
    if outcome:
        state = f"ended: {outcome['kind']}"
    elif state == "gone":
        state = "no node of it lives"
    elif state == "stopping":
        # The generation that comes next may never run.
        return plain(f"{name}: stopping generation {record['workers_generation']}")
    number = f", generation {generation['number']}" if generation else ""
    since = f" for {span(record['since_s'])}" if record["since_s"] is not None and not outcome else ""
    return plain(f"{name}: {state}{number}{since}")


def facts_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What there is to say of the job as a whole: a word, and a text of one line."""
    seated = [node for node in record["nodes"] if node["first_rank"] is not None]
    size = f"{plural(len(seated), 'node')}, {plural(record['world_size'], 'rank')}"
    if not seated:
        # Whoever does not know of spares knows of no other member either.
        known = "" if record["spares"] is not None else "at least "
        size = f"{known}{len(record['nodes'])} of {plural(record['nodes_min'] or 1, 'node')}"
    elif record["spares"]:
        size += f", {plural(record['spares'], 'spare')}"
    if gone := sum(node["state"] in ("lost", "left") for node in seated):
        size += f"; {plural(gone, 'node')} of it gone"
    facts = [("command", record["command"]), ("size", size)]
    if step := record["step"]:
        numbers = str(step["min"]) if step["min"] == step["max"] else f"{step['min']} to {step['max']}"
        facts.append(("step", numbers + (f", {fine(record['step_s'])} per step" if record["step_s"] else "")))
    facts.append(("restarts", _restarts(record["restarts"])))
    generation, failure = record["generation"], record["last_failure"]
    if failure:
        ago = "" if failure["ago_s"] is None else f"{span(failure['ago_s'])} ago: "
        facts.append(("failure", f"{ago}{failure['sentence']}"))
        if failure["frame"]:
            facts.append(("", f"at {failure['frame']}"))
        facts.append(("", failure["advice"]))
    facts.append(("hang", record["hang"] or ""))
    # A failure that is known says more than the cause of the restart.
    is_said = generation is None or (failure is not None and generation["kind"] == "fail")
    if generation and generation["number"] and not is_said:
        facts.append(("why", f"this generation began because {generation['cause']}"))
    if record["outcome"]:
        facts.append(("outcome", f"{record['outcome']['reason']}; exit code {record['outcome']['exit_code']}"))
    for node in record["nodes"]:
        facts += [("waits", f"{node['host']} for {node['waiting']}")] if node["waiting"] else []
        facts += [("trouble", f"{node['host']}: {node['trouble']}")] if node["trouble"] else []
        if node["memory_bytes"] is not None and len(record["nodes"]) <= _HOSTS_SAID:
            facts.append(("host", _host_words(node)))
    # Two agents of one host have the same trouble.
    return list(dict.fromkeys((label, plain(text)) for label, text in facts if text))


def rows_of(record: dict[str, Any], *, every_rank: bool = False) -> Rows:
    """The table with its heading: of all ranks where they are few or asked for, else of all nodes."""
    ranks = record["ranks"]
    if record["outcome"] or not (ranks or record["nodes"]):
        return []
    rows = _rank_rows(record) if ranks and (every_rank or len(ranks) <= RANKS_SHOWN) else _node_rows(record)
    return [tuple(plain(cell) for cell in row) for row in rows]


def remarks(record: dict[str, Any]) -> list[str]:
    """What the reader should know about this answer: who is missing in it, and what was left out."""
    said = [f"{node['host']} {node['silent']}" for node in record["nodes"] if node["silent"]]
    if len(record["ranks"]) > RANKS_SHOWN:
        said.append(_HINT)
    return [plain(line) for line in (*said, *record["notes"])]


def one_line(record: dict[str, Any]) -> str:
    """The record in one line, for a log."""
    parts = [headline(record)]
    if step := record["step"]:
        parts.append(f"step {step['min']}" + (f", {fine(record['step_s'])} per step" if record["step_s"] else ""))
    parts.append(_restarts(record["restarts"]))
    silent = [node["host"] for node in record["nodes"] if node["silent"]]
    if silent:
        parts.append(f"no answer from {', '.join(silent[:3])}" + (" and more" if len(silent) > 3 else ""))
    return plain("; ".join(parts))


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def span(seconds: float) -> str:
    """A duration in two units at most."""
    whole = int(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def fine(seconds: float) -> str:
    """The time of a step, in three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else span(seconds)
    return f"{seconds * 1000:.3g} ms"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _restarts(restarts: dict[str, Any]) -> str:
    if restarts["max"] is None:
        return ""
    window = f" within {span(restarts['window_s'])}" if restarts["window_s"] else ""
    return f"{restarts['left']} of {plural(restarts['max'], 'restart')} left{window}"


def _rank_rows(record: dict[str, Any]) -> Rows:
    rows: Rows = [("rank", "host", "pid", "state", "step", "step time", "waits", "last report", "memory", "phase")]
    for rank in record["ranks"]:
        rows.append(
            (
                str(rank["rank"]),
                rank["host"],
                str(rank["pid"]) if rank["pid"] > 0 else "–",
                rank["state"],
                "–" if rank["step"] is None else str(rank["step"]),
                "–" if rank["step_s"] is None else fine(rank["step_s"]),
                "–" if rank["wait_share"] is None else f"{rank['wait_share']:.0%}",
                "–" if rank["reported_ago_s"] is None else f"{span(rank['reported_ago_s'])} ago",
                _size(rank["memory_bytes"]),
                rank["phase"],
            )
        )
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    if all(rank["wait_share"] is None for rank in record["ranks"]):
        at = rows[0].index("waits")
        rows = [row[:at] + row[at + 1 :] for row in rows]
    there = {rank["node_id"] for rank in record["ranks"]}
    for node in record["nodes"]:
        if node["node_id"] not in there:
            row = (_seats(node), node["host"], "–", node["state"] or "no answer")
            rows.append((*row, *[""] * (len(rows[0]) - len(row))))
    return rows


def _seats(node: dict[str, Any]) -> str:
    first, slots = node["first_rank"], node["slots"]
    if first is None:
        return "spare" if node["is_spare"] else "–"
    return str(first) if slots == 1 else f"{first}–{first + slots - 1}"


def _node_rows(record: dict[str, Any]) -> Rows:
    rows: Rows = [("host", "ranks", "state", "step", "step time", "last report", "memory", "host's free", "load")]
    of_node: dict[str, list[dict[str, Any]]] = {}
    for rank in record["ranks"]:
        of_node.setdefault(rank["node_id"], []).append(rank)
    for node in record["nodes"]:
        ranks = of_node.get(node["node_id"], [])
        steps = [rank["step"] for rank in ranks if rank["step"] is not None]
        times = [rank["step_s"] for rank in ranks if rank["step_s"] is not None]
        ages = [rank["reported_ago_s"] for rank in ranks if rank["reported_ago_s"] is not None]
        sizes = [rank["memory_bytes"] for rank in ranks if rank["memory_bytes"] is not None]
        low, high = (min(steps), max(steps)) if steps else (None, None)
        rows.append(
            (
                node["host"],
                _seats(node),
                node["state"] or "no answer",
                "–" if low is None else str(low) if low == high else f"{low}–{high}",
                fine(median(times)) if times else "–",
                f"{span(max(ages))} ago" if ages else "–",
                _size(sum(sizes) if sizes else None),
                _size(node["memory_free_bytes"]),
                "–" if node["load"] is None else f"{node['load']:.1f}",
            )
        )
    return rows


def _host_words(node: dict[str, Any]) -> str:
    free, total = _size(node["memory_free_bytes"]), _size(node["memory_bytes"])
    load = "" if node["load"] is None else f"; load {node['load']:.1f}"
    cpus = f" on {plural(node['cpus'], 'CPU')}" if load and node["cpus"] else ""
    return f"{node['host']}: {free} of {total} of memory are available{load}{cpus}"


def _size(count: int | None) -> str:
    return "–" if count is None else bytes_text(count)
