"""The entries that a step adds to the run's timeline, the job's announcements (`--on-event`), and a node's report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elaunch.agent.core.events import Committed, Event, Signalled, Tag
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Joining, Phase, Running, Stopping
from elaunch.rendezvous.rules.hang_verdict import hang_sentence
from elaunch.rendezvous.rules.reports import RANKS_MAX, NodeReport, RankReport
from elaunch.rendezvous.rules.restart_policy import decisive_failure
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    host_of,
    job_name,
)

# The version of docs/events.schema.json. It changes when a field is removed or changes its meaning.
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
    """The entries for one step, in the order that a reader expects."""
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
        outcome = after.phase.outcome
        used = _budget(outcome)
        if outcome.kind is OutcomeKind.FAILED:
            yield Entry(outcome.generation, "gave_up", {**used, **_failures_of(outcome)})
        yield Entry(outcome.generation, "ended", {"outcome": outcome.kind.value, "code": outcome.exit_code, **used})


def of_failure(failure: Failure) -> dict[str, object]:
    """A failure's fields, except those without a value."""
    fields: dict[str, object] = {
        "kind": failure.kind.value,
        "sentence": failure.sentence,
        "message": failure.message,
        "host": failure.host,
        "failed_at": failure.failed_at,
    }
    if failure.rank >= 0:
        fields |= {"rank": failure.rank, "local_rank": failure.local_rank, "pid": failure.pid}
    if failure.step >= 0:
        fields["step"] = failure.step
    optional = ("code", "exception", "frame", "call", "advice", "traceback", "log_path", "error_file", "progressed")
    return fields | {name: value for name in optional if (value := getattr(failure, name)) not in (None, "")}


def of_outcome(outcome: Outcome) -> dict[str, object]:
    """The fields of a job's outcome."""
    code = {"outcome": outcome.kind.value, "exit_code": outcome.exit_code}
    return {**code, **_budget(outcome), **_failures_of(outcome)}


def of_seats(table: RankTable) -> list[dict[str, object]]:
    """The nodes of a table, in the order of their ranks."""
    return [
        {"host": seat.host, "node_id": seat.node_id, "first_rank": seat.first_rank, "workers": seat.slots}
        for seat in table.seats
    ]


def _of_the_store(before: Agent, after: Agent, number: int) -> Iterator[Entry]:
    """A store outage that is long enough to be logged, and its end."""
    was, now = before.reach, after.reach
    if now.is_logged and not was.is_logged:
        yield Entry(number, "store_away", {"trouble": now.last.trouble.value, "why": now.last.why})
    elif was.is_logged and not now.is_logged:
        yield Entry(number, "store_back", {})


def _of_hang(before: Agent, after: Agent, number: int) -> Iterator[Entry]:
    """The leader's verdict that the job hangs, once for each generation, and that the job has resumed."""
    was, now = before.snapshot.hang, after.snapshot.hang
    if now and (was is None or was.generation != now.generation):
        named = {"rank": now.rank} if now.rank >= 0 else {}
        yield Entry(now.generation, "seems_hung", {"host": host_of(now.node_id), "message": now.summary, **named})
    elif was and not now and was.generation == number and isinstance(after.phase, Running):
        yield Entry(number, "goes_on", {})


def _of_table(after: Agent, old: RankTable | None, new: RankTable | None) -> Iterator[Entry]:
    """The verdict on the generation before, which is the table's reason, and the nodes that left and joined."""
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


def _budget(outcome: Outcome) -> dict[str, object]:
    return {"reason": outcome.reason, "restarts": outcome.restarts, "max_restarts": outcome.max_restarts}


def _failures_of(outcome: Outcome) -> dict[str, object]:
    """The job's first failure, if that is of another kind, and the one that ended the job."""
    found = {"first_failure": outcome.first, "failure": outcome.failure}
    # The newest generation may be a later one, which was opened to restart and did not run.
    return {name: {"generation": each.generation, **of_failure(each)} for name, each in found.items() if each}


def _failures(agent: Agent) -> tuple[Failure, ...]:
    """The failures of this node's workers in the generation that ends."""
    match agent.phase:
        case Stopping(table, failures=failures, then=then) | Clearing(table, failures=failures, then=then):
            own = then.failure if then and not failures else None
            # A node that withdraws reports its failure to no other node: only its outcome has it.
            is_withdrawing = own and own.node_id == agent.me.node_id and own.generation == table.generation
            return (own,) if own and is_withdrawing else failures
    return ()


def _spare_of(phase: Phase) -> int:
    return phase.spare_of if isinstance(phase, Joining) else NO_GENERATION


def announcements(agent: Agent, happened: Iterable[Entry]) -> Iterator[Entry]:
    """The announcements of this node for the timeline's new entries; each has its sentence in the field `text`.

    The leader announces failures, hangs, restarts and the end of the job.
    """
    opened, hang, table = agent.snapshot.generation, agent.snapshot.hang, agent.snapshot.table
    for entry in happened:
        match entry.event:
            case "seems_hung" if agent.leads and hang and (hang.is_unawaited or not agent.restarts_hung):
                # Else it is reported as a failure, which is announced.
                text = f" seems to hang: {hang_sentence(hang, host_of(hang.node_id))}"
                fields = {"reason": hang.summary, **({"rank": hang.rank} if hang.rank >= 0 else {})}
                yield _announced("hang", agent, hang.generation, text, fields)
            case "opened" if agent.leads and opened and opened.kind.is_urgent and opened.kind is not OpenKind.RESTART:
                yield _failure(agent, opened)
            case "restarting" if agent.leads and opened and table:
                size = {"world_size": table.world_size, "nodes": len(table.seats)}
                text = f" continues in generation {table.generation}: {table.size_text} ({table.reason})"
                yield _announced(
                    "restart", agent, table.generation, text, {**_of_restart(agent, opened, table), **size}
                )
            case "ended" if isinstance(agent.phase, Exited) and _announces_end(agent, agent.phase.outcome):
                yield _end(agent, agent.phase.outcome)


def _announced(event: str, agent: Agent, generation: int, text: str, fields: Mapping[str, Any]) -> Entry:
    return Entry(generation, event, {"text": f"{job_name(agent.spec.run_id)}{text}", **fields})


def _failure(agent: Agent, opened: Generation) -> Entry:
    failures = agent.snapshot.failures.get(opened.number - 1)
    fields: dict[str, object] = {"reason": opened.cause}
    if not failures:
        return _announced("failure", agent, opened.number - 1, f": {opened.cause}", fields)
    failure = decisive_failure(failures)
    event = "hang" if failure.kind is FailureKind.HANG else "failure"
    fields["failure"] = of_failure(failure)
    return _announced(event, agent, failure.generation, f": {failure.sentence}", fields)


def _end(agent: Agent, outcome: Outcome) -> Entry:
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            text = f" succeeded, {outcome.restarts} of {outcome.max_restarts} restarts used"
        case OutcomeKind.FAILED:
            failures = [outcome.first.sentence_of_first] if outcome.first else []
            failures += [outcome.failure.sentence] if outcome.failure else []
            text = f" FAILED: {'; '.join([*failures, outcome.reason])}"
        case OutcomeKind.INTERRUPTED:
            text = f" was stopped, since {outcome.reason}"
        case _:
            text = f" has ended on {agent.me.host}: {outcome.reason}"
    return _announced("end", agent, outcome.generation, text, of_outcome(outcome))


def _announces_end(agent: Agent, outcome: Outcome) -> bool:
    """Whether this node's outcome is the job's, and this node is the one that announces it."""
    if outcome.kind is OutcomeKind.REFUSED:
        return False
    leader, table = agent.snapshot.leader, agent.snapshot.table
    if agent.spec.nodes_max == 1 or (table and len(table.seats) == 1):
        return True
    if outcome.kind is OutcomeKind.UNKNOWN and table:
        # The store is gone, perhaps with the leader that served it. The others cannot agree on who announces.
        others = [seat.node_id for seat in table.seats if seat.node_id != leader]
        return agent.me.node_id in (leader, *others[:1])
    return agent.snapshot.ended is not None and leader == agent.me.node_id


@dataclass(frozen=True)
class WorkersSeen:
    """The workers of `generation`, started `age_s` ago, as their links and their fork server show them."""

    generation: int
    age_s: float
    ranks: tuple[RankReport, ...]


# By phase, as `elaunch status` shows them.
_STATES = {
    Joining: "waiting",
    Running: "running",
    Stopping: "stopping",
    Clearing: "stopping",
    Finished: "done",
    Exited: "ended",
}


def node_report(agent: Agent, pid: int, age_s: float, seen: WorkersSeen | None) -> NodeReport:
    """The report of the node. `pid` is the agent's process, started `age_s` ago. `seen` is None before any spawn."""
    phase, reach = agent.phase, agent.reach
    state = _STATES[type(phase)]
    live = phase.live if isinstance(phase, (Running, Stopping)) else frozenset()
    report = NodeReport(
        agent.me.node_id,
        agent.me.host,
        pid,
        state,
        age_s,
        waiting=agent.waiting.text,
        topology=agent.me.topology,
        trouble="" if reach.failing_since_s is None else f"the store {reach.last.trouble.value}: {reach.last.why}",
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
