"""What a step of the agent adds to the run's timeline; pure.

Stages of processes (forked, exited, cleared) are stamped where they happen. What the agent has learned or decided shows
only as the difference between its states before and after a step, and is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.agent.core.events import Committed, Event, Signalled, Tag
from elaunch.agent.core.phases import Clearing, Exited, Joining, Phase, Running, Stopping, WorkersStopped
from elaunch.agent.core.state import Agent
from elaunch.rendezvous.rules.verdict import decisive_failure
from elaunch.rendezvous.types import Failure, OpenKind, Outcome, OutcomeKind, RankTable, host_of

# The version of docs/events.schema.json. It changes when a field goes, or changes its meaning.
SCHEMA_VERSION = 1
# The generation of events before the first rank table.
NO_GENERATION = -1


@dataclass(frozen=True)
class Entry:
    """One event of the timeline, without its time. The values of `fields` have a JSON form."""

    generation: int
    event: str
    fields: Mapping[str, Any]


def entries(before: Agent, after: Agent, event: Event) -> Iterator[Entry]:
    """What happened in a step, in the order in which a reader expects it."""
    opened, known = after.snapshot.generation, before.snapshot.generation
    number = opened.number if opened else NO_GENERATION
    if isinstance(event, Signalled):
        yield Entry(number, "signalled", {"signal": event.name})
    yield from _of_the_store(before, after, number)
    for failure in _failures(after)[len(_failures(before)) :]:
        yield Entry(failure.generation, "failed", of_failure(failure))
    if after.last_failure and after.last_failure is not before.last_failure:
        yield Entry(after.last_failure.generation, "cause", of_failure(after.last_failure))
    if opened and (known is None or opened.number > known.number):
        yield Entry(number, "opened", {"kind": opened.kind.value, "cause": opened.cause})
    if opened and isinstance(event, Committed) and event.tag is Tag.JOIN and event.held:
        yield Entry(number, "joined", {"node_id": after.me.node_id})
    yield from _of_hang(before, after, number)
    if after.snapshot is not before.snapshot:
        yield from _of_table(after, before.snapshot.table, after.snapshot.table)
    if (spare := _spare_of(after.phase)) > _spare_of(before.phase):
        table = after.snapshot.table
        yield Entry(spare, "spare", {"nodes": of_seats(table)} if table else {})
    if isinstance(after.phase, Exited) and not isinstance(before.phase, Exited):
        yield from _of_end(after.phase.outcome)


def of_failure(failure: Failure) -> dict[str, object]:
    """A failure's fields. What it has not is left out."""
    fields: dict[str, object] = {
        "kind": failure.kind.value,
        "sentence": failure.sentence,
        "message": failure.message,
        "host": failure.host,
        "failed_at": failure.failed_at,
    }
    if failure.rank >= 0:
        fields |= {"rank": failure.rank, "local_rank": failure.local_rank, "pid": failure.pid}
    found = {
        "code": failure.code,
        "exception": failure.exception or None,
        "frame": failure.frame or None,
        "call": failure.call or None,
        "advice": failure.advice or None,
        "step": failure.step if failure.step >= 0 else None,
        "traceback": failure.traceback or None,
        "log_path": failure.log_path or None,
        "error_file": failure.error_file or None,
        "progressed": failure.progressed,
    }
    return {**fields, **{name: value for name, value in found.items() if value is not None}}


def of_failures(outcome: Outcome) -> dict[str, object]:
    """The job's first failure, if that is of another kind, and the one that ended the job."""
    first, failure = outcome.first, outcome.failure
    return {
        **({"first_failure": {"generation": first.generation, **of_failure(first)}} if first else {}),
        **({"failure": of_failure(failure)} if failure else {}),
    }


def of_seats(table: RankTable) -> list[dict[str, object]]:
    """The nodes of a table, in the order of their ranks."""
    return [
        {"host": seat.host, "node_id": seat.node_id, "first_rank": seat.first_rank, "workers": seat.slots}
        for seat in table.seats
    ]


def _of_the_store(before: Agent, after: Agent, number: int) -> Iterator[Entry]:
    """A store that fails for so long that the log says so, and its return."""
    was, now = before.reach, after.reach
    if now.is_said and not was.is_said:
        yield Entry(number, "store_away", {"trouble": now.trouble.value, "why": now.why})
    elif was.is_said and not now.is_said:
        yield Entry(number, "store_back", {})


def _of_hang(before: Agent, after: Agent, number: int) -> Iterator[Entry]:
    """The leader's verdict that the job hangs, once for each generation, and that it goes on after all."""
    was, now = before.snapshot.hang, after.snapshot.hang
    if now and (was is None or was.generation != now.generation):
        named = {"rank": now.rank} if now.rank >= 0 else {}
        yield Entry(now.generation, "seems_hung", {"host": host_of(now.node_id), "message": now.said, **named})
    elif was and not now and was.generation == number and isinstance(after.phase, Running):
        yield Entry(number, "goes_on", {})


def _of_table(after: Agent, old: RankTable | None, new: RankTable | None) -> Iterator[Entry]:
    """The verdict on the generation before, which the table's reason tells, and the nodes that went and came."""
    generation = after.snapshot.generation
    if old is None or new is None or generation is None or not old.generation < new.generation == generation.number:
        return
    seats_before, seats_now = {s.node_id for s in old.seats}, {s.node_id for s in new.seats}
    went = sorted(host_of(node_id) for node_id in seats_before - seats_now)
    came = sorted(host_of(node_id) for node_id in seats_now - seats_before)
    if went:
        how = "node_left" if generation.kind is OpenKind.LEAVE else "node_lost"
        yield Entry(new.generation, how, {"hosts": went})
    if came:
        yield Entry(new.generation, "node_joined", {"hosts": came})
    failures = after.snapshot.failures.get(old.generation)
    yield Entry(
        new.generation,
        "restarting",
        {
            "kind": generation.kind.value,
            "cause": generation.cause,
            "reason": new.reason,
            "restarts": new.restarts,
            "max_restarts": after.spec.max_restarts,
            **({"failure": of_failure(decisive_failure(failures))} if failures else {}),
        },
    )


def _of_end(outcome: Outcome) -> Iterator[Entry]:
    used = {"reason": outcome.reason, "restarts": outcome.restarts, "max_restarts": outcome.max_restarts}
    if outcome.kind is OutcomeKind.FAILED:
        yield Entry(outcome.generation, "gave_up", {**used, **of_failures(outcome)})
    yield Entry(outcome.generation, "ended", {"outcome": outcome.kind.value, "code": outcome.exit_code, **used})


def _failures(agent: Agent) -> tuple[Failure, ...]:
    """The failures of this node's workers in the generation that ends."""
    match agent.phase:
        case Stopping(table, failures=failures, then=then) | Clearing(table, ended=WorkersStopped(failures), then=then):
            own = then.failure if then and not failures else None
            # A node that bows out tells nobody else of its failure: only its outcome has it.
            is_bowing_out = own and own.node_id == agent.me.node_id and own.generation == table.generation
            return (own,) if own and is_bowing_out else failures
    return ()


def _spare_of(phase: Phase) -> int:
    match phase:
        case Joining(spare_of=generation):
            return generation
    return NO_GENERATION
