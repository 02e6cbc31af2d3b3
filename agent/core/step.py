"""The agent's decisions: `step(agent, event, now_s) -> (agent, actions)`, without I/O, one table row per event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from signal import SIGINT
from typing import Any, Generic, TypeVar

from elaunch.agent.core import events, membership, running, stopping, store_outage
from elaunch.agent.core.actions import Log
from elaunch.agent.core.membership import attend
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Joining, Phase, Running, Step, Stopping
from elaunch.agent.core.store_outage import gives_up_at_s, log_waits
from elaunch.rendezvous.types import Outcome

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
NONE_LEFT = Ignored("the last worker has exited")
UNBROKEN = Ignored("no peer has failed, so this worker is still needed")
HAS_GRACE = Ignored("the stop's own deadline covers this worker")
FORMING = Ignored("another generation is about to start, or the job ends")
NOT_AWAITED = Ignored("workers that are to end need not report")
NOTHING_TO_CLEAR = Ignored("not possible: it follows `Clear`, and nothing is being cleared")
STILL_LIVE = Ignored("not possible: it follows `Clear`, which comes after the last worker's exit")


@dataclass(frozen=True)
class Row(Generic[E]):
    """The handlers of one kind of event, by phase."""

    event: type[E]
    joining: Handler[Joining, E]
    running: Handler[Running, E]
    stopping: Handler[Stopping, E]
    clearing: Handler[Clearing, E]
    finished: Handler[Finished, E]


def _alike(event: type[E], handler: Handler[Any, E]) -> Row[E]:
    """The row of an event that every phase handles alike."""
    return Row(event, handler, handler, handler, handler, handler)


# fmt: off
# Each row: the event; then joining, running, stopping, clearing, finished. An event about workers names their
# generation, and changes nothing in another one.
ROWS: tuple[Row[Any], ...] = (
    Row(events.SnapshotChanged,
        membership.snapshot_changed, running.snapshot_changed, stopping.snapshot_changed, UNCLEARED,
        stopping.finished_snapshot_changed),
    _alike(events.Committed, membership.committed),
    _alike(events.Leased, membership.leased),
    _alike(events.LeaseLost, membership.lease_lost),
    _alike(events.StoreFailed, store_outage.store_failed),
    _alike(events.StoreBack, store_outage.store_back),
    Row(events.StoreLost,
        membership.store_lost, running.store_lost, stopping.store_lost, stopping.store_lost, membership.store_lost),
    Row(events.WorkerExited, NO_WORKERS, running.worker_exited, stopping.worker_exited, NONE_LEFT, ALL_DONE),
    Row(events.WorkerEnded, NO_WORKERS, running.worker_ended, HAS_GRACE, NONE_LEFT, ALL_DONE),
    Row(events.WorkerListens, NO_WORKERS, running.worker_listens, stopping.worker_listens, NONE_LEFT, ALL_DONE),
    Row(events.WorkerSaving, NO_WORKERS, stopping.worker_saving, stopping.worker_saving, NONE_LEFT, ALL_DONE),
    Row(events.WorkerSaved, NO_WORKERS, UNBROKEN, stopping.worker_saved, NONE_LEFT, ALL_DONE),
    Row(events.WorkerStopped, NO_WORKERS, running.worker_stopped, stopping.worker_stopped, NONE_LEFT, ALL_DONE),
    Row(events.Sampled, NO_WORKERS, running.sampled, NOT_AWAITED, NONE_LEFT, ALL_DONE),
    Row(events.StacksTaken, NO_WORKERS, running.stacks_taken, NOT_AWAITED, NONE_LEFT, ALL_DONE),
    Row(events.GroupFailed, NO_WORKERS, running.group_failed, stopping.group_failed, NONE_LEFT, ALL_DONE),
    Row(events.Cleared, NOTHING_TO_CLEAR, STILL_LIVE, STILL_LIVE, stopping.cleared, NOTHING_TO_CLEAR),
    Row(events.Signalled,
        membership.leave, running.signalled, stopping.signalled, stopping.clearing_signalled, membership.leave),
    Row(events.RestartOrdered, membership.restart, membership.restart, FORMING, FORMING, membership.restart),
    Row(events.Tick, store_outage.tick, running.tick, stopping.tick, stopping.clearing_tick, store_outage.tick),
)
# fmt: on
TABLE: Mapping[type[Phase], Mapping[type[events.Event], Handler[Any, Any]]] = {
    Joining: {row.event: row.joining for row in ROWS},
    Running: {row.event: row.running for row in ROWS},
    Stopping: {row.event: row.stopping for row in ROWS},
    Clearing: {row.event: row.clearing for row in ROWS},
    Finished: {row.event: row.finished for row in ROWS},
}


def step(agent: Agent, event: events.Event, now_s: float) -> Step:
    """The agent's next state, and its actions, when `event` happens at `now_s` (monotonic)."""
    phase = agent.phase
    if isinstance(phase, Exited) or _is_of_another_generation(phase, event):
        return agent, ()
    if isinstance(event, events.Signalled) and event.is_order and agent.is_interrupted:
        # A second SIGINT would kill workers that are saving.
        return agent, ()
    if isinstance(event, events.SnapshotChanged):
        agent, actions = _follow_store(replace(agent, snapshot=event.snapshot), now_s)
        unreadable = (Log(f"{sentence}; continuing without it", "warning") for sentence in event.snapshot.unreadable)
        return agent, (*unreadable, *actions)
    agent, logged = log_waits(agent, now_s) if isinstance(event, events.Tick) else (agent, ())
    agent, actions = TABLE[type(phase)][type(event)](agent, phase, event, now_s)
    actions = (*logged, *actions)
    if isinstance(event, events.Signalled) and event.signum == SIGINT:
        agent = replace(agent, is_interrupted=True)
    if not _is_sync_point(agent, phase, event, now_s):
        return agent, actions
    agent, more = _follow_store(replace(agent, lead_at_s=None) if isinstance(event, events.Tick) else agent, now_s)
    return agent, (*actions, *more)


def deadline_s(agent: Agent) -> float | None:
    """When the agent's next `Tick` is due, or None."""
    phase_s = None
    match agent.phase:
        case Exited():
            return None
        case Running() as phase:
            phase_s = running.due_s(phase)
        case Stopping(due_s=due_s, until_s=until_s):
            phase_s = due_s if until_s is None else min(due_s, until_s)
        case Clearing(then=Outcome(), until_s=until_s):
            phase_s = until_s
    timers_s = (phase_s, agent.lead_at_s, agent.waiting.due_s, agent.reach.log_at_s, gives_up_at_s(agent))
    return min((at_s for at_s in timers_s if at_s is not None), default=None)


def _is_of_another_generation(phase: Phase, event: events.Event) -> bool:
    match phase:
        case Running(table=table) | Stopping(table=table) | Clearing(table=table):
            return isinstance(event, events.WorkerEvent) and event.generation != table.generation
    return False


def _is_sync_point(agent: Agent, before: Phase, event: events.Event, now_s: float) -> bool:
    """Whether the event lets the agent decide something else from the same snapshot."""
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


def _follow_store(agent: Agent, now_s: float) -> Step:
    """Apply the snapshot to the phase, then choose this node's next transaction."""
    table = agent.snapshot.table
    if table and table.generation != agent.table_seen[0]:
        agent = replace(agent, table_seen=(table.generation, now_s))
    handler, event = TABLE[type(agent.phase)][events.SnapshotChanged], events.SnapshotChanged(agent.snapshot)
    agent, actions = handler(agent, agent.phase, event, now_s)
    agent, more = attend(agent, now_s)
    return agent, (*actions, *more)
