"""The agent's decisions: `step(agent, event, now_s) -> (agent, actions)`, without I/O, by one row for each event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from elaunch.agent.core import clearing, events, hangs, joining, leaving, membership, running, stopping, store_outage
from elaunch.agent.core.actions import Log
from elaunch.agent.core.membership import attend
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Joining, Phase, Running, Step, Stopping
from elaunch.agent.core.store_outage import gives_up_at_s

P = TypeVar("P")
E = TypeVar("E")
Handler = Callable[[Agent, P, E, float], Step]


@dataclass(frozen=True)
class Ignored:
    """A cell in which nothing is done, and why."""

    reason: str

    def __call__(self, agent: Agent, _phase: object, _event: object, _now_s: float) -> Step:
        return agent, ()


NO_WORKERS = Ignored("no worker of this node runs")
ALL_DONE = Ignored("all workers of this node have exited with 0")
UNCLEARED = Ignored("a newer generation is joined when all is cleared")
NONE_LEFT = Ignored("the last worker is gone")
OVER = Ignored("this agent's work is done")
UNBROKEN = Ignored("no peer has failed, so this worker is still needed")
HAS_GRACE = Ignored("the stop's own deadline covers this worker")
FORMING = Ignored("another generation is about to start, or the job ends")
NOT_AWAITED = Ignored("workers that are to end need not report")
KILLED_IN_TIME = Ignored("a worker that hangs gets SIGKILL at the stop's deadline")
NOTHING_TO_CLEAR = Ignored("not possible: it answers `Clear`, and nothing is being cleared")
STILL_LIVE = Ignored("not possible: it answers `Clear`, which comes after the last worker's end")


@dataclass(frozen=True)
class Row(Generic[E]):
    """What one kind of event means in each phase."""

    event: type[E]
    joining: Handler[Joining, E]
    running: Handler[Running, E]
    stopping: Handler[Stopping, E]
    clearing: Handler[Clearing, E]
    finished: Handler[Finished, E]
    exited: Handler[Exited, E] = OVER


def _alike(event: type[E], handler: Handler[Any, E]) -> Row[E]:
    """An event that means the same in every phase."""
    return Row(event, handler, handler, handler, handler, handler)


# fmt: off
# Each row: the event; then joining, running, stopping, clearing, finished. An event about workers names their
# generation, and changes nothing in another one.
ROWS: tuple[Row[Any], ...] = (
    Row(events.SnapshotChanged, joining.looked, running.looked, stopping.looked, UNCLEARED, clearing.finished_looked),
    _alike(events.Committed, membership.committed),
    _alike(events.Leased, membership.leased),
    _alike(events.LeaseLost, membership.lease_lost),
    _alike(events.StoreFailed, store_outage.store_failed),
    _alike(events.StoreBack, store_outage.store_back),
    Row(events.StoreLost,
        joining.store_lost, running.store_lost, stopping.store_lost, stopping.store_lost, joining.store_lost),
    Row(events.WorkerExited, NO_WORKERS, running.worker_exited, stopping.worker_exited, NONE_LEFT, ALL_DONE),
    Row(events.WorkerEnded, NO_WORKERS, running.worker_ended, HAS_GRACE, NONE_LEFT, ALL_DONE),
    Row(events.WorkerListens, NO_WORKERS, running.worker_listens, stopping.worker_listens, NONE_LEFT, ALL_DONE),
    Row(events.WorkerSaving, NO_WORKERS, stopping.worker_saving, stopping.worker_saving, NONE_LEFT, ALL_DONE),
    Row(events.WorkerSaved, NO_WORKERS, UNBROKEN, stopping.worker_saved, NONE_LEFT, ALL_DONE),
    Row(events.WorkerStopped, NO_WORKERS, running.worker_stopped, stopping.worker_stopped, NONE_LEFT, ALL_DONE),
    Row(events.Sampled, NO_WORKERS, hangs.sampled, NOT_AWAITED, NONE_LEFT, ALL_DONE),
    Row(events.StacksTaken, NO_WORKERS, hangs.stacks_taken, NOT_AWAITED, NONE_LEFT, ALL_DONE),
    Row(events.WorkersHung, NO_WORKERS, running.workers_hung, KILLED_IN_TIME, NONE_LEFT, ALL_DONE),
    Row(events.ServiceLost, NO_WORKERS, running.service_lost, stopping.service_lost, NONE_LEFT, ALL_DONE),
    Row(events.Cleared, NOTHING_TO_CLEAR, STILL_LIVE, STILL_LIVE, clearing.cleared, NOTHING_TO_CLEAR),
    Row(events.Signalled,
        leaving.signalled, running.signalled, stopping.signalled, clearing.signalled, leaving.signalled),
    Row(events.RestartOrdered, leaving.restart, leaving.restart, FORMING, FORMING, leaving.restart),
    Row(events.Tick, store_outage.tick, running.tick, stopping.tick, clearing.tick, store_outage.tick),
)
# fmt: on
TABLE: Mapping[type[Phase], Mapping[type[events.Event], Handler[Any, Any]]] = {
    Joining: {row.event: row.joining for row in ROWS},
    Running: {row.event: row.running for row in ROWS},
    Stopping: {row.event: row.stopping for row in ROWS},
    Clearing: {row.event: row.clearing for row in ROWS},
    Finished: {row.event: row.finished for row in ROWS},
    Exited: {row.event: row.exited for row in ROWS},
}


def step(agent: Agent, event: events.Event, now_s: float) -> Step:
    """What the agent becomes and does when `event` happens at `now_s` (monotonic)."""
    phase = agent.phase
    if isinstance(phase, Exited) or _is_of_another_generation(phase, event):
        return agent, ()
    if isinstance(event, events.SnapshotChanged):
        agent, actions = _look(replace(agent, snapshot=event.snapshot), now_s)
        unreadable = (Log(f"{sentence}; going on without it", "warning") for sentence in event.snapshot.unreadable)
        return agent, (*unreadable, *actions)
    agent, actions = TABLE[type(phase)][type(event)](agent, phase, event, now_s)
    if not _is_to_look(agent, phase, event, now_s):
        return agent, actions
    agent, more = _look(replace(agent, lead_at_s=None) if isinstance(event, events.Tick) else agent, now_s)
    return agent, (*actions, *more)


def deadline_s(agent: Agent) -> float | None:
    """When the agent wants its next `Tick`, or None."""
    if isinstance(agent.phase, Exited):
        return None
    timers_s = (
        _phase_due_s(agent.phase),
        agent.lead_at_s,
        agent.waiting.due_s,
        agent.reach.log_at_s,
        gives_up_at_s(agent),
    )
    return min((at_s for at_s in timers_s if at_s is not None), default=None)


def _phase_due_s(phase: Phase) -> float | None:
    match phase:
        case Running():
            return running.due_s(phase)
        case Stopping():
            return phase.next_s
        case Clearing():
            return clearing.due_s(phase)
    return None


def _is_of_another_generation(phase: Phase, event: events.Event) -> bool:
    match phase:
        case Running(table=table) | Stopping(table=table) | Clearing(table=table):
            return isinstance(event, events.WorkerEvent) and event.generation != table.generation
    return False


def _is_to_look(agent: Agent, before: Phase, event: events.Event, now_s: float) -> bool:
    """Whether what the event changed lets the agent make something else of what the store says."""
    match event:
        case _ if isinstance(agent.phase, Exited):
            return False
        case events.Leased() | events.Committed():
            return True
        case events.Cleared():
            return isinstance(before, Clearing)
        case events.Tick():
            return agent.lead_at_s is not None and now_s >= agent.lead_at_s
    return False


def _look(agent: Agent, now_s: float) -> Step:
    """Follow what the store says, then write to it what is this node's to write."""
    agent = _note_table(agent, now_s)
    agent, actions = TABLE[type(agent.phase)][events.SnapshotChanged](
        agent, agent.phase, events.SnapshotChanged(agent.snapshot), now_s
    )
    agent, more = attend(agent, now_s)
    return agent, (*actions, *more)


def _note_table(agent: Agent, now_s: float) -> Agent:
    table = agent.snapshot.table
    if table is None or table.generation == agent.table_seen[0]:
        return agent
    return replace(agent, table_seen=(table.generation, now_s))
