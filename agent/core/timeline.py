"""What a step of the agent adds to the run's timeline, what the job announces (`--on-event`), and a node's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from elaunch.agent.core.events import SIGINT, Committed, Event, Signalled, Tag
from elaunch.agent.core.state import (
    Agent,
    Clearing,
    Exited,
    Finished,
    Joining,
    Phase,
    Running,
    Stopping,
    WorkersStopped,
)
from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.rules.hang_verdict import Hang, hang_words
from elaunch.rendezvous.rules.reports import RANKS_MAX, NodeReport, RankReport
from elaunch.rendezvous.rules.verdict import decisive_failure
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    host_of,
)

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
    yield Entry(new.generation, "restarting", {"kind": generation.kind.value, **_of_restart(after, generation, new)})


def _of_restart(agent: Agent, opened: Generation, table: RankTable) -> dict[str, object]:
    failures = agent.snapshot.failures.get(table.generation - 1)
    return {
        "cause": opened.cause,
        "reason": table.reason,
        "restarts": table.restarts,
        "max_restarts": agent.spec.max_restarts,
        **({"failure": of_failure(decisive_failure(failures))} if failures else {}),
    }


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
        yield from _of_snapshot(before, after)
    leaving, was_leaving = _outcome(after), _outcome(before)
    if leaving and not was_leaving and before.leads and _leaves_others(after, leaving):
        text = f"{job_name(after.spec.run_id)}: {after.me.host} leaves, since {leaving.reason}"
        yield Announcement(AnnouncementKind.LEAVE, leaving.generation, text, {"reason": leaving.reason})
    if isinstance(after.phase, Exited) and not isinstance(before.phase, Exited):
        outcome = after.phase.outcome
        if _tells_end(after, outcome):
            yield _end(after, outcome)


def _of_snapshot(before: Agent, after: Agent) -> Iterator[Announcement]:
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
    workers = "1 worker" if table.world_size == 1 else f"{table.world_size} workers"
    text = f"{job_name(agent.spec.run_id)} goes on in generation {table.generation}: {workers}{nodes} ({table.reason})"
    fields = {
        **_of_restart(agent, opened, table),
        "world_size": table.world_size,
        "nodes": len(table.seats),
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


@dataclass(frozen=True)
class WorkersSeen:
    """The workers of `generation`, started `age_s` ago, as their links and their fork server show them."""

    generation: int
    age_s: float
    ranks: tuple[RankReport, ...]


def node_report(agent: Agent, pid: int, age_s: float, seen: WorkersSeen | None) -> NodeReport:
    """The report of the node. `pid` is the agent's process, which began `age_s` ago. `seen` is None before a start."""
    (state, live), reach = _state(agent), agent.reach
    report = NodeReport(
        agent.me.node_id,
        agent.me.host,
        pid,
        state,
        age_s,
        waiting=agent.waiting.text,
        trouble="" if reach.failing_since_s is None else f"the store {reach.trouble.value}: {reach.why}",
    )
    if seen is None:
        return report
    gone = "done" if state == "done" else "exited"
    ranks = tuple(
        replace(rank, state=gone) if rank.local_rank not in live
        # The fork server still imports.
        else replace(rank, state="starting") if rank.pid <= 0
        else rank
        for rank in seen.ranks[:RANKS_MAX]
    )  # fmt: skip
    return replace(report, generation=seen.generation, workers_age_s=seen.age_s, ranks=ranks)


def _state(agent: Agent) -> tuple[str, frozenset[int]]:
    """One word for the phase, and the local ranks that run."""
    match agent.phase:
        case Joining():
            return "waiting", frozenset()
        case Running(live=live):
            return "running", live
        case Stopping(live=live):
            return "stopping", live
        case Clearing():
            return "stopping", frozenset()
        case Finished():
            return "done", frozenset()
        case Exited():
            return "ended", frozenset()
