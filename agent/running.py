"""What an agent makes of the things that happen to its workers."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.events import (
    Commit,
    Say,
    ServiceLost,
    SignalWorkers,
    WorkerExited,
    WorkerRaised,
)
from elaunch.agent.state import Agent, Phase, Running, Step, Stopping
from elaunch.agent.stopping import LAST_WORDS_S, SIGINT, SIGKILL, SIGTERM, goodbye, stop, stop_for
from elaunch.rendezvous import entering
from elaunch.rendezvous.types import Failure, FailureKind, OutcomeKind, RankTable

# Schedulers signal the agent and its workers together; a worker that died so is no failure if our signal comes too.
HOLD_S = 0.1


def worker_exited(agent: Agent, event: WorkerExited, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table, live=live, held=held) as running if table.generation == event.generation:
            left = live - {event.local_rank}
            if event.failure is None:
                if left or held:
                    return replace(agent, phase=_without(running, event.local_rank)), ()
                return stop(agent, Stopping(table, left, now_s, done=True), 0, ())
            if event.code in (-SIGTERM, -SIGINT):
                kept = replace(_without(running, event.local_rank), held=held or event.failure)
                return replace(agent, phase=kept if held else replace(kept, held_until_s=now_s + HOLD_S)), ()
            return _fail(agent, running, left, held or event.failure, now_s)
        case Stopping(table=table) as stopping if table.generation == event.generation:
            if event.local_rank in stopping.live:
                return _exited_while_stopping(agent, stopping, event, now_s)
    return agent, ()


def raised(agent: Agent, event: WorkerRaised, now_s: float) -> Agent:
    match agent.phase:
        case Running(table=table, live=live) as running if table.generation == event.generation:
            if event.local_rank in live:
                leaving = (event.local_rank, now_s + agent.times.stop_grace_s)
                return replace(agent, phase=replace(running, leaving_s=(*running.leaving_s, leaving)))
    return agent


def service_lost(agent: Agent, event: ServiceLost, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table, live=live, held=held) as running if table.generation == event.generation:
            left: frozenset[int] = frozenset() if event.workers_too else live
            return _fail(agent, running, left, held or event.failure, now_s)
        case Stopping(table=table) as stopping if table.generation == event.generation and event.workers_too:
            return stop(agent, replace(stopping, live=frozenset()), 0, ()) if stopping.live else (agent, ())
    return agent, ()


def running_deadline_s(phase: Phase) -> float | None:
    match phase:
        case Running(held=held, held_until_s=until_s, leaving_s=leaving_s) if held or leaving_s:
            return min([*([until_s] if held else []), *(until_s for _, until_s in leaving_s)])
    return None


def tick_running(agent: Agent, running: Running, now_s: float) -> Step:
    if running.held and now_s >= running.held_until_s:
        return _fail(agent, running, running.live, running.held, now_s)
    late = frozenset(rank for rank, until_s in running.leaving_s if now_s >= until_s)
    if not late:
        return agent, ()
    # Seen with torch: the last reference to a process group waits for a thread that waits for the GIL.
    rest = tuple((rank, until_s) for rank, until_s in running.leaving_s if rank not in late)
    ranks = ", ".join(str(rank) for rank in sorted(late))
    text = f"local rank {ranks} raised an exception and did not end within {agent.times.stop_grace_s:g} s; SIGKILL"
    actions = (Say(text), SignalWorkers(running.table.generation, late, SIGKILL))
    return replace(agent, phase=replace(running, leaving_s=rest)), actions


def _without(running: Running, local_rank: int) -> Running:
    leaving_s = tuple((rank, until_s) for rank, until_s in running.leaving_s if rank != local_rank)
    return replace(running, live=running.live - {local_rank}, leaving_s=leaving_s)


def _fail(agent: Agent, running: Running, live: frozenset[int], failure: Failure, now_s: float) -> Step:
    """Open the next generation together with the failure that is its cause, then stop the others."""
    table, snapshot = running.table, agent.snapshot
    if failure.kind is FailureKind.STARTUP and running.is_first and table.progressed:
        return _bow_out(agent, table, live, failure, now_s)
    others = f"; stopping {len(live)} other{'s' if len(live) > 1 else ''}" if live else ""
    actions = (Commit(entering.fail(snapshot, agent.me, failure)), Say(failure.sentence + others))
    return stop(
        agent,
        replace(Stopping.within(table, live, now_s, agent.times.failure_grace_s), failure=failure),
        SIGTERM,
        actions,
    )


def _bow_out(agent: Agent, table: RankTable, live: frozenset[int], failure: Failure, now_s: float) -> Step:
    """A newcomer whose workers cannot even start has something wrong that the healthy job has not: it goes."""
    reason = "it never got past its start on this node, while the job ran on others; they go on without it"
    outcome = agent.outcome(OutcomeKind.FAILED, reason, failure=failure)
    farewell = goodbye(agent, opens=True, why="its workers could not start")
    agent, actions = stop_for(agent, table, live, outcome, SIGTERM, now_s, Say(failure.sentence), *farewell)
    return agent.as_member(is_member=False), actions


def _exited_while_stopping(agent: Agent, stopping: Stopping, event: WorkerExited, now_s: float) -> Step:
    stopping = replace(stopping, live=stopping.live - {event.local_rank})
    if stopping.then and not stopping.live:
        stopping = replace(stopping, kill_at_s=min(stopping.kill_at_s, now_s + LAST_WORDS_S))
    if not event.failure or _by_us(event.code, event.failure, stopping):
        return stop(agent, stopping, 0, ())
    if stopping.failure:
        stopping = replace(stopping, others=(*stopping.others, event.failure))
        return stop(agent, stopping, 0, ())
    generation = agent.snapshot.generation
    if stopping.then or generation is None or not _is_own_doing(event.failure):
        return stop(agent, stopping, 0, ())
    stopping = replace(stopping, failure=event.failure)
    if not generation.kind.is_urgent:
        # It was to stop for a join or a leave; now its peers wait for it in vain, and must be told to hurry.
        stopping = stopping.hurried(now_s, agent.times.failure_grace_s)
    # Else another node spoke first; it may have told of nothing but this end.
    actions = (Commit(entering.fail(agent.snapshot, agent.me, event.failure)), Say(event.failure.sentence))
    return stop(agent, stopping, 0, actions)


def _by_us(code: int, failure: Failure, stopping: Stopping) -> bool:
    """Whether a worker that ended while we were stopping ended of the signal that it got.

    One whose program had raised was on its way out: the signal found it there.
    """
    if failure.kind not in (FailureKind.SIGNAL, FailureKind.EXIT_CODE):
        return False
    return code in (-SIGTERM, 128 + SIGTERM) or (code == -SIGKILL and stopping.killed)


def _is_own_doing(failure: Failure) -> bool:
    """Whether no peer's end can be behind it; of a bare exit code nobody can say."""
    return failure.kind not in (FailureKind.PEER_LOST, FailureKind.EXIT_CODE)
