"""`elaunch status`: the status of a job, as the object of `--json` (docs/status.schema.json) and as text."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import datetime
from statistics import median
from typing import Any

import click

from elaunch.launcher.inspect.commands import JSON, RANKS, VERSION, job_command
from elaunch.launcher.inspect.job_source import Gathered, JobSource, absence
from elaunch.launcher.inspect.text import aligned, duration, span
from elaunch.rendezvous.format import bytes_text, plain, plural
from elaunch.rendezvous.rules.form_generation import counted_restarts
from elaunch.rendezvous.rules.reports import JobReport, JobState
from elaunch.rendezvous.types import RankTable, host_of, job_name

# More ranks than this are shown by node, unless --ranks requests them.
RANKS_SHOWN = 32
_OF_RANKS = ("rank", "host", "pid", "state", "step", "step time", "waits", "last report", "memory", "phase")
_HEAD = (*_OF_RANKS, "host free", "load", "topology")
_HINT = "elaunch status --ranks shows each rank"


def _main(ctx: click.Context, source: JobSource) -> int:
    record = status_record(source.take(), time.time())
    text = json.dumps(record) + "\n" if ctx.params["json"] else text_of(record, every_rank=ctx.params["ranks"])
    sys.stdout.write(text)
    return 0


STATUS = job_command(
    "status",
    [JSON, RANKS],
    "Show how a running job is doing: nodes, ranks, generation, step, step time, last failure, restarts left.",
    _main,
)


def status_record(known: Gathered, now: float) -> dict[str, Any]:
    """The object of `--json`. `now` is the wall clock, for absolute times."""
    job, seats = known.job, known.job.seats
    state = _state(known)
    # That of the newest table, else the newest that any node runs; -1 before the first.
    generation = max((report.generation for report in known.nodes.values()), default=-1)
    if job.state is JobState.RUNNING and job.generation:
        generation = job.generation.number
    ages_s = [report.workers_age_s for report in known.nodes.values() if report.generation == generation]
    age_s = max((age for age in ages_s if age is not None), default=None)
    # While the next generation forms, the workers that were started last have exited, or belong to the one before.
    since_s = age_s if state == "running" else None
    ranks = _ranks(known, generation)
    steps = [rank["step"] for rank in ranks if rank["step"] is not None]
    times = [rank["step_s"] for rank in ranks if rank["step_s"] is not None]
    newest, ended = job.generation, job.ended
    return {
        "version": VERSION,
        "run_id": job.run_id,
        "state": state,
        "command": job.terms.command if job.terms else "",
        "nodes_min": job.terms.nodes_min if job.terms else None,
        "nodes_max": job.terms.nodes_max if job.terms else None,
        "generation": newest and {"number": newest.number, "kind": newest.kind.value, "cause": newest.cause},
        "workers_generation": None if generation < 0 else generation,
        "since": None if since_s is None else _time(now - since_s),
        "since_s": _rounded(since_s, 1),
        "world_size": sum(seat.slots for seat in seats),
        "step": {"min": min(steps), "max": max(steps)} if steps else None,
        "step_s": _rounded(median(times) if times else None, 6),
        "restarts": _restarts(job, age_s or 0.0),
        "last_failure": _failure(job, now),
        "hang": job.hang or None,
        "outcome": ended and {"kind": ended.kind.value, "reason": ended.reason, "exit_code": ended.exit_code},
        # A partial view of the job's keys lacks members without a seat.
        "spares": (len(job.others) if seats else 0) if job.is_whole else None,
        "nodes": _nodes(known),
        "ranks": ranks,
        "notes": list(known.notes),
    }


def _state(known: Gathered) -> str:
    """The job's state; `stopping` while a node stops the workers of an ended generation."""
    state = known.job.state
    is_live = state in (JobState.FORMING, JobState.RUNNING)
    reported = [report.state for report in known.nodes.values()]
    # One node may stop its workers a moment before the others observe the generation's end.
    is_over = state is JobState.FORMING or all(each in ("stopping", "ended") for each in reported)
    return "stopping" if is_live and is_over and "stopping" in reported else state.value


def _time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        # Out of the calendar's range: another host's clock, or a forged record.
        return None


def _rounded(number: float | None, digits: int) -> float | None:
    return None if number is None else round(number, digits)


def _restarts(job: JobReport, age_s: float) -> dict[str, Any]:
    if job.terms is None:
        return {"used": job.restarts, "max": None, "left": None, "window_s": None}
    table = RankTable(0, (), "", 0, "", job.restarts, job.restart_ages_s)
    used, most = counted_restarts(job.terms, table, age_s), job.terms.max_restarts
    return {"used": used, "max": most, "left": max(0, most - used), "window_s": job.terms.restart_window_s}


def _failure(job: JobReport, now: float) -> dict[str, Any] | None:
    failure = job.failure
    if failure is None:
        return None
    names = ("generation", "host", "code", "sentence", "exception", "frame", "advice")
    return {
        **{name: getattr(failure, name) for name in names},
        "kind": failure.kind.value,
        "rank": None if failure.rank < 0 else failure.rank,
        "local_rank": None if failure.local_rank < 0 else failure.local_rank,
        "at": _time(failure.failed_at) if failure.failed_at else None,
        "ago_s": round(max(0.0, now - failure.failed_at), 1) if failure.failed_at else None,
    }


def _nodes(known: Gathered) -> list[dict[str, Any]]:
    rows: list[tuple[str, str, int | None, int]]
    rows = [(seat.node_id, seat.host, seat.first_rank, seat.slots) for seat in known.job.seats]
    rows += [(node_id, host_of(node_id), None, 0) for node_id in known.job.others]
    listed = {node_id for node_id, *_ in rows}
    is_live = known.job.ended is None
    absent = {seat.node_id for seat in known.job.seats if seat.is_member is False and is_live}
    rows += [(id_, report.host, None, 0) for id_, report in known.nodes.items() if id_ not in listed]
    names = ("pid", "waiting", "trouble", "memory_bytes", "memory_free_bytes", "cpus", "topology")
    found: list[dict[str, Any]] = []
    for node_id, host, first_rank, slots in rows:
        report = known.nodes.get(node_id)
        found.append(
            {
                "node_id": node_id,
                "host": host,
                "is_spare": first_rank is None and bool(known.job.seats),
                "first_rank": first_rank,
                "slots": slots,
                "state": report.state if report else absence(known.job, node_id) if node_id in absent else None,
                "since_s": round(report.age_s, 1) if report else None,
                **{name: getattr(report, name, None) for name in names},
                "load": _rounded(report.load, 2) if report else None,
                "silent": known.silent.get(node_id),
            }
        )
    return found


def _ranks(known: Gathered, generation: int) -> list[dict[str, Any]]:
    """The ranks of the newest table, as the nodes that run it report them; those of other nodes are left out."""
    found: list[dict[str, Any]] = []
    for seat in known.job.seats:
        report = known.nodes.get(seat.node_id)
        if report is None or report.generation != generation:
            continue
        for rank in report.ranks:
            row = asdict(rank) | {"node_id": seat.node_id, "host": seat.host}
            row["step"] = rank.step if rank.step >= 0 else None
            row["step_s"] = _rounded(rank.step_s, 6)
            row["wait_share"] = _rounded(rank.wait_share, 2)
            row["reported_ago_s"] = _rounded(rank.reported_ago_s, 1)
            found.append(row)
    return sorted(found, key=lambda row: row["rank"])


def text_of(record: dict[str, Any], *, every_rank: bool = False) -> str:
    """The record as `elaunch status` prints it: facts, a table of ranks or nodes, and what is missing in it."""
    lines = [headline(record), *(f"  {line}" for line in aligned(facts_of(record)))]
    ranks, nodes = record["ranks"], record["nodes"]
    if not record["outcome"] and (ranks or nodes):
        is_by_rank = bool(ranks) and (every_rank or len(ranks) <= RANKS_SHOWN)
        lines += ["", *aligned(_rows(record, by_rank=is_by_rank))]
    lines += [f"{node['host']} {node['silent']}" for node in nodes if node["silent"]]
    lines += [_HINT] if len(ranks) > RANKS_SHOWN and not every_rank else []
    return "".join(f"{plain(line)}\n" for line in (*lines, *record["notes"]))


def headline(record: dict[str, Any]) -> str:
    """The job in one line."""
    generation, outcome, state = record["generation"], record["outcome"], record["state"]
    name = job_name(record["run_id"])
    if outcome:
        state = f"ended: {outcome['kind']}"
    elif state == "gone":
        state = "no live node"
    elif state == "stopping":
        # The next generation may never run.
        return plain(f"{name}: stopping generation {record['workers_generation']}")
    number = f", generation {generation['number']}" if generation else ""
    since = f" for {span(record['since_s'])}" if record["since_s"] is not None and not outcome else ""
    return plain(f"{name}: {state}{number}{since}")


def facts_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts of the job as a whole: a label, and a text of one line."""
    facts = [("command", record["command"]), ("size", _size(record))]
    if step := record["step"]:
        numbers = str(step["min"]) if step["min"] == step["max"] else f"{step['min']} to {step['max']}"
        facts.append(("step", numbers + (f", {duration(record['step_s'])} per step" if record["step_s"] else "")))
    restarts, generation, failure = record["restarts"], record["generation"], record["last_failure"]
    if restarts["max"] is not None:
        window = f" within {span(restarts['window_s'])}" if restarts["window_s"] else ""
        facts.append(("restarts", f"{restarts['left']} of {plural(restarts['max'], 'restart')} left{window}"))
    if failure:
        ago = "" if failure["ago_s"] is None else f"{span(failure['ago_s'])} ago: "
        facts += [("failure", f"{ago}{failure['sentence']}"), ("", failure["frame"] and f"at {failure['frame']}")]
        facts.append(("", failure["advice"]))
    facts.append(("hang", record["hang"] or ""))
    # A known failure explains more than the cause of the restart.
    is_known = failure is not None and generation and generation["kind"] == "fail"
    if generation and generation["number"] and not is_known:
        facts.append(("why", f"this generation began because {generation['cause']}"))
    if record["outcome"]:
        facts.append(("outcome", f"{record['outcome']['reason']}; exit code {record['outcome']['exit_code']}"))
    for node in record["nodes"]:
        facts.append(("waits", node["waiting"] and f"{node['host']} for {node['waiting']}"))
        facts.append(("trouble", node["trouble"] and f"{node['host']}: {node['trouble']}"))
    # Two agents of one host have the same trouble.
    return list(dict.fromkeys((label, plain(text)) for label, text in facts if text))


def _size(record: dict[str, Any]) -> str:
    seated = [node for node in record["nodes"] if node["first_rank"] is not None]
    if not seated:
        # A view without the spares has no other members either.
        known = "" if record["spares"] is not None else "at least "
        return f"{known}{len(record['nodes'])} of {plural(record['nodes_min'] or 1, 'node')}"
    size = f"{plural(len(seated), 'node')}, {plural(record['world_size'], 'rank')}"
    size += f", {plural(record['spares'], 'spare')}" if record["spares"] else ""
    gone = sum(node["state"] in ("lost", "left") for node in seated)
    return size + (f"; {plural(gone, 'node')} lost or left" if gone else "")


def _rows(record: dict[str, Any], *, by_rank: bool) -> list[tuple[str, ...]]:
    """A row for each rank, or for each node with its ranks taken together; without empty columns."""
    rows: list[tuple[str, ...]] = []
    for node in record["nodes"]:
        its = [rank for rank in record["ranks"] if rank["node_id"] == node["node_id"]]
        for ranks in [[rank] for rank in its] if by_rank and its else [its]:
            one = ranks[0] if by_rank and ranks else {}
            steps, times, waits, ages, sizes = (
                [rank[name] for rank in ranks if rank[name] is not None]
                for name in ("step", "step_s", "wait_share", "reported_ago_s", "memory_bytes")
            )
            rows.append(
                (
                    str(one["rank"]) if one else _seats(node),
                    node["host"],
                    str(one["pid"]) if one.get("pid", 0) > 0 else "",
                    one["state"] if one else node["state"] or "no answer",
                    "–".join(map(str, sorted({min(steps), max(steps)}))) if steps else "",
                    duration(median(times)) if times else "",
                    f"{median(waits):.0%}" if waits else "",
                    f"{span(max(ages))} ago" if ages else "",
                    bytes_text(sum(sizes)) if sizes else "",
                    one.get("phase", ""),
                    "" if by_rank or node["memory_free_bytes"] is None else bytes_text(node["memory_free_bytes"]),
                    "" if by_rank or node["load"] is None else f"{node['load']:.1f}",
                    node["topology"] or "",
                )
            )
    columns = [at for at in range(len(_HEAD)) if any(row[at] for row in rows)]
    return [tuple(row[at] for at in columns) for row in (_HEAD, *rows)]


def _seats(node: dict[str, Any]) -> str:
    first, slots = node["first_rank"], node["slots"]
    if first is None:
        return "spare" if node["is_spare"] else "–"
    return str(first) if slots == 1 else f"{first}–{first + slots - 1}"
