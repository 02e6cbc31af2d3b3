"""What is known of a job, as the one JSON object of `--json`; pure. docs/observe.md has its schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from statistics import median
from typing import Any

from elaunch.rendezvous.rules.forming import counted_restarts
from elaunch.rendezvous.rules.reports import JobReport, JobState, NodeReport
from elaunch.rendezvous.types import OpenKind, RankTable, host_of

# Grows when a field changes its meaning or goes away. New fields may come without that.
VERSION = 1


@dataclass(frozen=True)
class Gathered:
    """All that was learned of a job: its keys, its nodes' reports, and why a node did not report, both by node id."""

    job: JobReport
    nodes: Mapping[str, NodeReport]
    silent: Mapping[str, str]
    notes: tuple[str, ...] = ()


def status_record(known: Gathered, now: float) -> dict[str, Any]:
    """The object. `now` is the wall clock, for times that people read."""
    job, table_of = known.job, known.job.seats
    generation, state = table_generation(known), _state(known)
    ages_s = [report.workers_age_s for report in known.nodes.values() if report.generation == generation]
    age_s = max((age for age in ages_s if age is not None), default=None)
    # While the next generation forms, the workers that were started last are gone, or still of another one.
    since_s = age_s if state == "running" else None
    ranks = _ranks(known, generation)
    return {
        "version": VERSION,
        "run_id": job.run_id,
        "state": state,
        "command": job.terms.command if job.terms else "",
        "nodes_min": job.terms.nodes_min if job.terms else None,
        "nodes_max": job.terms.nodes_max if job.terms else None,
        "generation": _generation(job),
        "workers_generation": None if generation < 0 else generation,
        "since": None if since_s is None else _time(now - since_s),
        "since_s": None if since_s is None else round(since_s, 1),
        "world_size": sum(seat.slots for seat in table_of),
        **_steps(ranks),
        "restarts": _restarts(job, age_s or 0.0),
        "last_failure": _failure(job, now),
        "hang": job.hang or None,
        "outcome": _outcome(job),
        "spares": _spares(job),
        "nodes": _nodes(known),
        "ranks": ranks,
        "notes": list(known.notes),
    }


def table_generation(known: Gathered) -> int:
    """The generation of the newest table: the newest one any of the nodes runs. -1 before the first."""
    if known.job.state is JobState.RUNNING and known.job.generation:
        return known.job.generation.number
    return max((report.generation for report in known.nodes.values()), default=-1)


def _state(known: Gathered) -> str:
    """The job's state; `stopping` as long as a node ends the workers of a generation that is over."""
    state = known.job.state
    is_live = state in (JobState.FORMING, JobState.RUNNING)
    reported = [report.state for report in known.nodes.values()]
    # One node may stop its workers a moment before the others hear that the generation is over.
    is_over = state is JobState.FORMING or all(word in ("stopping", "ended") for word in reported)
    return "stopping" if is_live and is_over and "stopping" in reported else state.value


def _spares(job: JobReport) -> int | None:
    """The members without a seat. Only the whole of the job's keys has them."""
    if not job.is_whole:
        return None
    return len(job.others) if job.seats else 0


def absence(job: JobReport, node_id: str) -> str:
    """Whether a seated node without a lease left or was lost: one word."""
    has_left = job.generation and job.generation.kind is OpenKind.LEAVE and job.generation.node_id == node_id
    return "left" if has_left else "lost"


def _time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        # No calendar has it: some other host's clock, or a record that somebody made up.
        return None


def _generation(job: JobReport) -> dict[str, Any] | None:
    if job.generation is None:
        return None
    return {"number": job.generation.number, "kind": job.generation.kind.value, "cause": job.generation.cause}


def _steps(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [rank["step"] for rank in ranks if rank["step"] is not None]
    times = [rank["step_s"] for rank in ranks if rank["step_s"] is not None]
    return {
        "step": {"min": min(steps), "max": max(steps)} if steps else None,
        "step_s": round(median(times), 6) if times else None,
    }


def _restarts(job: JobReport, age_s: float) -> dict[str, Any]:
    if job.terms is None:
        return {"used": job.restarts, "max": None, "left": None, "window_s": None}
    table = RankTable(0, (), "", 0, "", job.restarts, job.restart_ages_s)
    used = counted_restarts(job.terms, table, age_s)
    most = job.terms.max_restarts
    return {"used": used, "max": most, "left": max(0, most - used), "window_s": job.terms.restart_window_s}


def _failure(job: JobReport, now: float) -> dict[str, Any] | None:
    failure = job.failure
    if failure is None:
        return None
    return {
        "generation": failure.generation,
        "kind": failure.kind.value,
        "host": failure.host,
        "rank": None if failure.rank < 0 else failure.rank,
        "local_rank": None if failure.local_rank < 0 else failure.local_rank,
        "code": failure.code,
        "sentence": failure.sentence,
        "exception": failure.exception,
        "frame": failure.frame,
        "advice": failure.advice,
        "at": _time(failure.failed_at) if failure.failed_at else None,
        "ago_s": round(max(0.0, now - failure.failed_at), 1) if failure.failed_at else None,
    }


def _outcome(job: JobReport) -> dict[str, Any] | None:
    if job.ended is None:
        return None
    return {"kind": job.ended.kind.value, "reason": job.ended.reason, "exit_code": job.ended.exit_code}


def _nodes(known: Gathered) -> list[dict[str, Any]]:
    seats = [(seat.node_id, seat.host, seat.first_rank, seat.slots) for seat in known.job.seats]
    others = [(node_id, host_of(node_id), None, 0) for node_id in known.job.others]
    rows = [*seats, *others]
    listed = {node_id for node_id, *_ in rows}
    is_live = known.job.ended is None
    absent = {seat.node_id for seat in known.job.seats if seat.is_member is False and is_live}
    rows += [(id_, report.host, None, 0) for id_, report in known.nodes.items() if id_ not in listed]
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
                "pid": report.pid if report else None,
                "since_s": round(report.age_s, 1) if report else None,
                "waiting": report.waiting if report else "",
                "trouble": report.trouble if report else "",
                "memory_bytes": report.memory_bytes if report else None,
                "memory_free_bytes": report.memory_free_bytes if report else None,
                "cpus": report.cpus if report else None,
                "load": round(report.load, 2) if report and report.load is not None else None,
                "silent": known.silent.get(node_id),
            }
        )
    return found


def _ranks(known: Gathered, generation: int) -> list[dict[str, Any]]:
    """The ranks of the newest table, as the nodes that run it say; those of other nodes are left out."""
    found: list[dict[str, Any]] = []
    for seat in known.job.seats:
        report = known.nodes.get(seat.node_id)
        if report is None or report.generation != generation:
            continue
        for rank in report.ranks:
            row = asdict(rank)
            has_step = rank.step >= 0
            row |= {"node_id": seat.node_id, "host": seat.host, "step": rank.step if has_step else None}
            row["step_s"] = None if rank.step_s is None else round(rank.step_s, 6)
            row["wait_share"] = None if rank.wait_share is None else round(rank.wait_share, 2)
            row["reported_ago_s"] = None if rank.reported_ago_s is None else round(rank.reported_ago_s, 1)
            found.append(row)
    return sorted(found, key=lambda row: row["rank"])
