"""What the job tells somebody outside of it (`--on-event`): once for the job, not once for each node; pure.

The leader tells: it decides what becomes of the job, and its snapshot has all records. If the leader dies in the very
moment, nobody tells, or its successor tells again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elaunch.agent.core.entries import of_failure, of_failures
from elaunch.agent.core.phases import Clearing, Exited, Stopping
from elaunch.agent.core.signals import SIGINT
from elaunch.agent.core.state import Agent
from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.rules.hang_records import Hang, hang_words
from elaunch.rendezvous.rules.verdict import decisive_failure
from elaunch.rendezvous.types import FailureKind, Generation, OpenKind, Outcome, OutcomeKind, RankTable, host_of


class AnnouncementKind(Enum):
    """What is told. `LEAVE` is a leader that goes while other nodes may go on."""

    FAILURE = "failure"
    HANG = "hang"
    RESTART = "restart"
    LEAVE = "leave"
    END = "end"


@dataclass(frozen=True)
class Announcement:
    """One thing to tell: `text` is a sentence for people, the values of `fields` have a JSON form."""

    kind: AnnouncementKind
    generation: int
    text: str
    fields: Mapping[str, Any]


def announcements(before: Agent, after: Agent) -> Iterator[Announcement]:
    """What this node has to tell after a step."""
    if after.leads and after.snapshot is not before.snapshot:
        yield from _of_the_store(before, after)
    leaving, was_leaving = _outcome(after), _outcome(before)
    if leaving and not was_leaving and before.leads and _leaves_others(after, leaving):
        text = f"{job_name(after.spec.run_id)}: {after.me.host} leaves, since {leaving.reason}"
        yield Announcement(AnnouncementKind.LEAVE, leaving.generation, text, {"reason": leaving.reason})
    if isinstance(after.phase, Exited) and not isinstance(before.phase, Exited):
        outcome = after.phase.outcome
        if _tells_end(after, outcome):
            yield _end(after, outcome)


def _of_the_store(before: Agent, after: Agent) -> Iterator[Announcement]:
    known, opened = before.snapshot.generation, after.snapshot.generation
    if known is None or opened is None:
        return
    was, hang = before.snapshot.hang, after.snapshot.hang
    if hang and (was is None or was.generation != hang.generation) and (hang.is_unawaited or not after.restarts_hung):
        # Else it is told as the failure that is made of it.
        yield _hang(after, hang)
    if opened.number > known.number and opened.kind.is_urgent and opened.kind is not OpenKind.RESTART:
        yield _failure(after, opened)
    old, new = before.snapshot.table, after.snapshot.table
    if old and new and old.generation < new.generation == opened.number:
        yield _restart(after, opened, new)


def _hang(agent: Agent, hang: Hang) -> Announcement:
    text = f"{job_name(agent.spec.run_id)} seems to hang: {hang_words(hang, host_of(hang.node_id))}"
    fields = {"reason": hang.said, **({"rank": hang.rank} if hang.rank >= 0 else {})}
    return Announcement(AnnouncementKind.HANG, hang.generation, text, fields)


def _failure(agent: Agent, opened: Generation) -> Announcement:
    failures = agent.snapshot.failures.get(opened.number - 1)
    job = job_name(agent.spec.run_id)
    if not failures:
        return Announcement(
            AnnouncementKind.FAILURE, opened.number - 1, f"{job}: {opened.cause}", {"reason": opened.cause}
        )
    failure = decisive_failure(failures)
    kind = AnnouncementKind.HANG if failure.kind is FailureKind.HANG else AnnouncementKind.FAILURE
    fields = {"reason": opened.cause, "failure": of_failure(failure)}
    return Announcement(kind, failure.generation, f"{job}: {failure.sentence}", fields)


def _restart(agent: Agent, opened: Generation, table: RankTable) -> Announcement:
    nodes = "" if len(table.seats) == 1 else f" on {len(table.seats)} nodes"
    failures = agent.snapshot.failures.get(table.generation - 1)
    workers = "1 worker" if table.world_size == 1 else f"{table.world_size} workers"
    text = f"{job_name(agent.spec.run_id)} goes on in generation {table.generation}: {workers}{nodes} ({table.reason})"
    fields = {
        "reason": table.reason,
        "cause": opened.cause,
        "restarts": table.restarts,
        "max_restarts": agent.spec.max_restarts,
        "world_size": table.world_size,
        "nodes": len(table.seats),
        **({"failure": of_failure(decisive_failure(failures))} if failures else {}),
    }
    return Announcement(AnnouncementKind.RESTART, table.generation, text, fields)


def _end(agent: Agent, outcome: Outcome) -> Announcement:
    job, used = job_name(agent.spec.run_id), f"{outcome.restarts} of {outcome.max_restarts} restarts used"
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            text = f"{job} succeeded, {used}"
        case OutcomeKind.FAILED:
            said = [outcome.first.sentence_of_first] if outcome.first else []
            said += [outcome.failure.sentence] if outcome.failure else []
            text = f"{job} FAILED: {'; '.join([*said, outcome.reason])}"
        case OutcomeKind.INTERRUPTED:
            text = f"{job} was stopped, since {outcome.reason}"
        case _:
            text = f"{job} has ended on {agent.me.host}: {outcome.reason}"
    fields = {
        "outcome": outcome.kind.value,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "restarts": outcome.restarts,
        "max_restarts": outcome.max_restarts,
        **of_failures(outcome),
    }
    return Announcement(AnnouncementKind.END, outcome.generation, text, fields)


def _outcome(agent: Agent) -> Outcome | None:
    """The outcome that this agent exits with, as soon as it is known."""
    match agent.phase:
        case Exited(outcome=outcome) | Stopping(then=Outcome() as outcome) | Clearing(then=Outcome() as outcome):
            return outcome
    return None


def _is_alone(agent: Agent) -> bool:
    table = agent.snapshot.table
    return agent.spec.nodes_max == 1 or (table is not None and len(table.seats) == 1)


def _leaves_others(agent: Agent, outcome: Outcome) -> bool:
    is_leave = outcome.kind is OutcomeKind.INTERRUPTED and outcome.signum != SIGINT
    return is_leave and not _is_alone(agent) and not agent.snapshot.ended


def _tells_end(agent: Agent, outcome: Outcome) -> bool:
    """Whether this node's end is the job's, and this node tells of it."""
    if outcome.kind is OutcomeKind.REFUSED:
        return False
    if _is_alone(agent):
        return True
    leader = agent.snapshot.leader
    if outcome.kind is OutcomeKind.UNKNOWN and agent.snapshot.table:
        # The store is gone, perhaps with the leader that served it. The others cannot agree on who tells.
        others = [seat.node_id for seat in agent.snapshot.table.seats if seat.node_id != leader]
        return agent.me.node_id in (leader, *others[:1])
    return agent.snapshot.ended is not None and leader == agent.me.node_id
