"""The agent's decisions: `step(agent, event, now_s) -> (agent, actions)`, without I/O.

States: JOINING, RUNNING, STOPPING, FINISHED, EXITED (rendezvous protocol). An event of another generation changes
nothing.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.events import (
    Cleared,
    Committed,
    Event,
    Leased,
    LeaseLost,
    Looked,
    OwnStoreLost,
    Reported,
    Say,
    ServiceLost,
    Signalled,
    Spawn,
    StoreAway,
    StoreBack,
    StoreLost,
    StoreRefuses,
    Tick,
    WatchRefused,
    WorkerExited,
    WorkerListens,
    WorkerRaised,
    WorkerSaved,
    WorkerSaving,
    WorkersHung,
    WorkerStopped,
)
from elaunch.agent.core.membership import answered, attend, joining, lease_lost, leased, tick_waiting
from elaunch.agent.core.messages import StopReason
from elaunch.agent.core.own_store import last_failure, own_store_lost, without_own_store
from elaunch.agent.core.running import (
    hung,
    raised,
    reported,
    running_deadline_s,
    service_lost,
    tick_running,
    worker_exited,
)
from elaunch.agent.core.state import Agent, Exited, Finished, Joining, Running, Step, Stopping, exit_with
from elaunch.agent.core.stop_orders import (
    NOTICE_S,
    SIGTERM,
    listens,
    saved,
    saving,
    stop_at_boundary,
    stop_broken,
    stopped,
)
from elaunch.agent.core.stopping import cleared, signalled, stop_for, stopping_deadline_s, tick_stopping
from elaunch.agent.core.store_outage import gives_up_at_s, store_back, store_failed, tick_away, without_workers
from elaunch.rendezvous.types import Generation, OpenKind, Outcome, OutcomeKind, RankTable, host_of


def step(agent: Agent, event: Event, now_s: float) -> Step:
    """What the agent becomes and does when `event` happens at `now_s` (monotonic)."""
    if isinstance(agent.phase, Exited):
        return agent, ()
    match event:
        case Looked(snapshot):
            agent, actions = _look(replace(agent, snapshot=snapshot), now_s)
            return agent, (*(Say(f"{sentence}; going on without it") for sentence in snapshot.unreadable), *actions)
        case Leased():
            return _look(leased(agent, event), now_s)
        case LeaseLost():
            return lease_lost(agent, event, now_s)
        case Committed():
            return _look(answered(agent, event), now_s)
        case OwnStoreLost():
            return own_store_lost(agent, event)
        case StoreAway() | StoreRefuses() if agent.store_gone:
            return agent, ()
        case StoreRefuses(why, is_denied=True) if not agent.membership.has_entered:
            # Rejected on first contact means misconfiguration, not a lost job.
            return _store_lost(agent, OutcomeKind.REFUSED, why, now_s)
        case StoreAway() | StoreRefuses():
            return store_failed(agent, event, now_s), ()
        case WatchRefused(why):
            every_s = f"{agent.times.lease_ttl_s:g} s"
            return agent, (Say(f"the store refuses to tell of changes: {why}; they are read every {every_s}"),)
        case StoreBack():
            return store_back(agent, now_s)
        case StoreLost(why):
            return _store_lost(agent, OutcomeKind.UNKNOWN, why, now_s)
        case WorkerExited():
            return worker_exited(agent, event, now_s)
        case WorkerRaised():
            return raised(agent, event, now_s), ()
        case WorkerListens():
            return listens(agent, event)
        case WorkerSaving():
            return saving(agent, event), ()
        case WorkerSaved():
            return saved(agent, event)
        case WorkerStopped():
            return stopped(agent, event, now_s), ()
        case Reported():
            return reported(agent, event, now_s)
        case WorkersHung():
            return hung(agent, event, now_s)
        case ServiceLost():
            return service_lost(agent, event, now_s)
        case Signalled():
            return signalled(agent, event, now_s)
        case Cleared():
            return _cleared(agent, event, now_s)
        case Tick():
            return _tick(agent, now_s)


def deadline_s(agent: Agent) -> float | None:
    """When the agent wants its next `Tick`, or None."""
    if isinstance(agent.phase, Exited):
        return None
    timers_s = (
        running_deadline_s(agent.phase),
        stopping_deadline_s(agent.phase),
        agent.lead_at_s,
        agent.waiting.due_s,
        agent.reach.unsaid_until_s,
        gives_up_at_s(agent),
    )
    return min((at_s for at_s in timers_s if at_s is not None), default=None)


def _cleared(agent: Agent, event: Cleared, now_s: float) -> Step:
    if not isinstance(agent.phase, Stopping) or agent.phase.table.generation != event.generation:
        return agent, ()
    agent, actions = cleared(agent, last_failure(agent, agent.phase), event, now_s)
    agent = without_workers(agent, now_s)
    agent, last = without_own_store(agent)
    agent, more = (agent, ()) if isinstance(agent.phase, Exited) else _look(agent, now_s)
    return agent, (*actions, *last, *more)


def _look(agent: Agent, now_s: float) -> Step:
    """Follow what the store says, then write to it what is this node's to write."""
    agent, actions = _follow(_note_table(agent, now_s), now_s)
    agent, more = attend(agent, now_s)
    return agent, (*actions, *more)


def _note_table(agent: Agent, now_s: float) -> Agent:
    table = agent.snapshot.table
    if table is None or table.generation == agent.table_seen[0]:
        return agent
    return replace(agent, table_seen=(table.generation, now_s))


def _follow(agent: Agent, now_s: float) -> Step:
    snapshot, phase, generation = agent.snapshot, agent.phase, agent.snapshot.generation
    if generation is None:
        if agent.table_seen[0] < 0 or isinstance(phase, (Stopping, Exited)):
            return agent, ()
        why = f"the keys of job {agent.spec.run_id!r} are gone from the store"
        return _store_lost(agent, OutcomeKind.UNKNOWN, why, now_s)
    newest = generation.number
    # Of a run that this node has just started over an old one, the last look may still be the old one's.
    is_own_run = agent.membership.belongs and snapshot.revision >= agent.membership.answered
    match phase:
        case Joining() | Finished() if snapshot.ended and is_own_run:
            return exit_with(agent, snapshot.ended)
        case Running() as running if snapshot.ended:
            return _stop_with_job(agent, running, snapshot.ended, now_s)
        case Joining(asked=asked, ran=ran) if asked == newest > ran and agent.membership.is_member:
            return _take_seat(agent, snapshot.current_table, phase, now_s)
        case Running(table=table) as running if newest > table.generation:
            return _make_way(agent, running, generation, now_s)
        case Stopping(table=table, killed=False, live=live) as stopping if newest > table.generation and live:
            if generation.kind.is_urgent:
                return _hurry(agent, stopping, now_s)
        case Finished(table) if newest > table.generation:
            return joining(agent, table.generation), (Say(f"running again: {generation.cause}"),)
    return agent, ()


def _stop_with_job(agent: Agent, running: Running, ended: Outcome, now_s: float) -> Step:
    is_person = ended.kind is OutcomeKind.INTERRUPTED
    grace_s = agent.times.stop_grace_s if is_person else agent.times.failure_grace_s
    signum, at_s = _signal_for(agent, agent.snapshot.generation, running, now_s)
    # The time to save begins when they are told.
    stopping = replace(Stopping.of(running, now_s, grace_s + (NOTICE_S if at_s else 0.0)), then=ended)
    reason = StopReason.INTERRUPT if is_person else StopReason.LEAVE
    said = Say(f"stopping: the job has ended: {ended.reason}")
    return stop_at_boundary(agent, stopping, reason, signum, (said,), notice_at_s=at_s)


def _make_way(agent: Agent, running: Running, generation: Generation, now_s: float) -> Step:
    """Stop this node's workers for a newer generation: at once where the group is broken, else after a step."""
    times, said = agent.times, (Say(f"stopping: {generation.cause}"),)
    if generation.kind.is_urgent:
        return stop_broken(agent, Stopping.of(running, now_s, times.failure_grace_s), said)
    reason = StopReason.JOIN if generation.kind is OpenKind.JOIN else StopReason.LEAVE
    is_awaited = bool((running.live & running.words.to_stop) - running.words.stopped)
    wait_s = times.boundary_wait_s if is_awaited else 0.0
    stopping = Stopping.of(running, now_s, wait_s + times.stop_grace_s)
    signum, at_s = _signal_for(agent, generation, running, now_s)
    return stop_at_boundary(agent, stopping, reason, signum, said, until_s=now_s + wait_s, notice_at_s=at_s)


def _signal_for(
    agent: Agent, generation: Generation | None, running: Running, now_s: float
) -> tuple[int, float | None]:
    """What ends workers that do not listen, and when: SIGTERM now, or a notice by which another node leaves.

    A scheduler sends that to all nodes, and each hears of the first one's leave before the slowest has its own; where
    the program has a handler for the notice, SIGTERM would end it unsaved. One sent to all processes of this node, too,
    is not to be doubled: so its own is waited for.
    """
    if generation and generation.number > running.table.generation and generation.signum in agent.notices:
        return generation.signum, now_s + NOTICE_S
    return SIGTERM, None


def _hurry(agent: Agent, stopping: Stopping, now_s: float) -> Step:
    """What began as a stop for a join, a leave or a signal has become one for a failure: no step will end any more."""
    if stopping.then is None:
        stopping = stopping.hurried(now_s, agent.times.failure_grace_s)
    if stopping.is_broken:
        return replace(agent, phase=stopping), ()
    return stop_broken(agent, stopping)


def _take_seat(agent: Agent, table: RankTable | None, phase: Joining, now_s: float) -> Step:
    """Start this node's workers, if the newest generation has a table that seats it."""
    if table is None:
        return agent, ()
    group_rank = table.group_rank(agent.me.node_id)
    if group_rank is None:
        if phase.spare_of == table.generation:
            return agent, ()
        said = Say(f"generation {table.generation} runs without this node: {_why_seatless(agent, table)}")
        return replace(agent, phase=replace(phase, spare_of=table.generation)), (said,)
    workers = "1 worker" if table.world_size == 1 else f"{table.world_size} workers"
    nodes = "" if len(table.seats) == 1 else f" on {len(table.seats)} nodes"
    started = Say(f"generation {table.generation}: {workers}{nodes} ({table.reason})")
    running = Running(table, frozenset(range(table.seats[group_rank].slots)), is_first=phase.ran < 0)
    crowded = _crowded(agent.me.host, table) if running.is_first else ()
    return replace(agent, phase=running), (started, *crowded, Spawn(table, group_rank))


def _crowded(host: str, table: RankTable) -> tuple[Say, ...]:
    """A word of several agents on one host, which is rarely meant: their workers share its accelerators."""
    agents = sum(host_of(seat.node_id) == host for seat in table.seats)
    return (Say(f"{agents} agents of this job run on {host}; was one meant for another host?"),) if agents > 1 else ()


def _why_seatless(agent: Agent, table: RankTable) -> str:
    if len(table.seats) < agent.spec.nodes_max:
        # It came while that one was formed, or it was cut off: those that run make room at their next step boundary.
        again = agent.spec.max_restarts > 0
        return "it came too late; " + ("waiting for the next" if again else "with max_restarts 0 there is no other")
    seats = "1 seat is" if len(table.seats) == 1 else f"{len(table.seats)} seats are"
    return f"its {seats} taken; waiting as a spare"


def _store_lost(agent: Agent, kind: OutcomeKind, why: str, now_s: float) -> Step:
    outcome = agent.outcome(kind, why)
    match agent.phase:
        case Running() as running:
            return stop_for(agent, running, outcome, StopReason.LEAVE, SIGTERM, now_s, Say(f"stopping: {why}"))
        case Stopping() as stopping:
            return replace(agent, phase=replace(stopping, then=stopping.then or outcome)), ()
        case _:
            return exit_with(agent, outcome)


def _tick(agent: Agent, now_s: float) -> Step:
    agent, actions = tick_waiting(agent, now_s)
    agent, more = tick_away(agent, now_s)
    actions, more = (*actions, *more), ()
    match agent.phase:
        case Running():
            agent, more = tick_running(agent, agent.phase, now_s)
        case Stopping() as stopping:
            agent, more = tick_stopping(agent, stopping, now_s)
    actions = (*actions, *more)
    if agent.lead_at_s is not None and now_s >= agent.lead_at_s:
        agent, more = _look(replace(agent, lead_at_s=None), now_s)
        actions = (*actions, *more)
    return agent, actions
