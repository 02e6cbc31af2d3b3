"""The failures of a run, each once, in the order in which they are told (pure)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.launcher.report_page.events import PastEvent, real
from elaunch.launcher.report_page.node_log import Homes, NodeLog, Worker, homes_of
from elaunch.launcher.report_page.wording import signal_words

# Kinds of failures that another failure explains.
_SECONDARY = ("peer lost", "ended early")


@dataclass(frozen=True)
class Fault:
    """One failure. `at_s` is in seconds of the job; `rank` is -1 if no worker caused it.

    `is_cause` says that the generation ended because of it. `folder` is the log folder of the failed worker's node.
    """

    generation: int
    at_s: float
    host: str
    rank: int
    local_rank: int
    pid: int
    kind: str
    sentence: str
    advice: str = ""
    exception: str = ""
    traceback: str = ""
    log_path: str = ""
    folder: str = ""
    quiet_s: float = 0.0
    is_cause: bool = False


def faults_of(nodes: Sequence[NodeLog]) -> tuple[Fault, ...]:
    """All failures by generation: its cause first, then the others by time."""
    found: dict[tuple[int, str, int, int], Fault] = {}
    for fault in _said(nodes):
        key = (fault.generation, fault.host, fault.rank, fault.pid)
        known = found.get(key)
        found[key] = _joined(known, fault) if known else fault
    for fault in _from_exits(nodes):
        key = (fault.generation, fault.host, fault.rank, fault.pid)
        if key not in found:
            found[key] = fault
    by_generation: dict[int, list[Fault]] = {}
    for fault in found.values():
        by_generation.setdefault(fault.generation, []).append(fault)
    return tuple(fault for number in sorted(by_generation) for fault in _ordered(by_generation[number]))


def _ordered(faults: list[Fault]) -> list[Fault]:
    """The cause first; if no log names it, the earliest that no other failure explains."""
    faults.sort(key=lambda fault: (not fault.is_cause, fault.kind in _SECONDARY, fault.at_s))
    return [replace(faults[0], is_cause=True), *(replace(fault, is_cause=False) for fault in faults[1:])]


def _joined(known: Fault, newer: Fault) -> Fault:
    """Both texts of one failure: the newer one knows more, but its record may be shorter."""
    return replace(
        newer,
        at_s=known.at_s,
        advice=newer.advice or known.advice,
        traceback=newer.traceback or known.traceback,
        log_path=newer.log_path or known.log_path,
        folder=known.folder or newer.folder,
        quiet_s=max(known.quiet_s, newer.quiet_s),
        is_cause=known.is_cause or newer.is_cause,
    )


def _said(nodes: Sequence[NodeLog]) -> Iterator[Fault]:
    numbers = sorted({visit.generation for node in nodes for visit in node.visits if visit.workers})
    homes = homes_of(nodes)
    for node in nodes:
        hang = {visit.generation: visit.quiet_s for visit in node.visits if visit.quiet_s == visit.quiet_s}
        for at_s, event in node.events:
            if event.event in ("failed", "cause"):
                yield _fault(node, homes, at_s, event, event.fields, event.generation, hang)
            elif event.event in ("restarting", "gave_up") and (record := event.record("failure")):
                generation = _generation_before(numbers, event)
                yield replace(_fault(node, homes, at_s, event, record, generation, hang), is_cause=True)


def _generation_before(numbers: Sequence[int], event: PastEvent) -> int:
    """The generation on which a verdict was given, of all in order. `gave_up` carries the number of the last itself."""
    before = bisect_left(numbers, event.generation)
    return numbers[before - 1] if before and event.event != "gave_up" else event.generation


def _fault(
    node: NodeLog,
    homes: Homes,
    at_s: float,
    event: PastEvent,
    fields: Mapping[str, object],
    generation: int,
    hang: Mapping[int, float],
) -> Fault:
    record = PastEvent(generation, event.event, event.at_s, event.monotonic_s, fields)
    host = record.text("host") or node.host
    home = homes.get((host, generation, record.number("rank")))
    home = home or (node if host == node.host else homes.get((host, -1, -1)))
    # `failed_at` is the wall clock of the failed worker's host; the event cannot be earlier than the failure.
    struck_s = real(fields.get("failed_at"), event.at_s) - event.at_s + at_s if home is node else at_s
    is_hang = record.text("kind") == "hang"
    return Fault(
        generation,
        min(at_s, struck_s) if at_s - struck_s < 3600 else at_s,
        host,
        record.number("rank"),
        record.number("local_rank"),
        record.number("pid"),
        record.text("kind"),
        record.text("sentence") or record.text("message"),
        advice=record.text("advice"),
        exception=record.text("exception"),
        traceback=record.text("traceback"),
        log_path=record.text("log_path"),
        folder=home.folder if home else "",
        quiet_s=hang.get(generation, 0.0) if is_hang else 0.0,
    )


def _from_exits(nodes: Sequence[NodeLog]) -> Iterator[Fault]:
    """Failures that only the exit codes tell: logs of older releases, or of an agent that was killed."""
    for node in nodes:
        for visit in node.visits:
            for worker in visit.workers:
                if worker.code and not worker.was_asked:
                    yield _of_exit(node, visit.generation, worker)


def _of_exit(node: NodeLog, generation: int, worker: Worker) -> Fault:
    code = worker.code or 0
    how = f"was killed by {signal_words(-code)}" if code < 0 else f"ended with exit code {code}"
    where = f"rank {worker.rank} (local rank {worker.local_rank} on {node.host}, pid {worker.pid})"
    return Fault(
        generation,
        worker.exited_s if not math.isnan(worker.exited_s) else worker.forked_s,
        node.host,
        worker.rank,
        worker.local_rank,
        worker.pid,
        "signal" if code < 0 else "exit code",
        f"{where} {how} in generation {generation}",
        folder=node.folder,
    )
