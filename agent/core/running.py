"""What an agent makes of the things that happen to its workers."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.events import (
    Commit,
    Reported,
    Say,
    ServiceLost,
    SignalWorkers,
    TakeStacks,
    WorkerExited,
    WorkerRaised,
    WorkersHung,
)
from elaunch.agent.core.state import Agent, Held, Phase, Running, Step, Stopping
from elaunch.agent.core.stop_orders import SIGINT, SIGKILL, SIGTERM, stop_broken
from elaunch.agent.core.stopping import LAST_WORDS_S, go_on_stopping, goodbye
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.types import Failure, FailureKind, OutcomeKind

# Schedulers signal the agent and its workers together; a worker that died so is no failure if our signal comes too.
HOLD_S = 0.1
# HUP, INT, QUIT, USR1, USR2, TERM: those that somebody sends on purpose.
ASKING = (1, 2, 3, 10, 12, 15)
# All ranks of a job stop after the same step, also those whose agent has not yet heard why.
STOPPED_HOLD_S = 2.0
STOPPED_CODES = (0, 128 + SIGTERM, 128 + SIGINT)


def worker_exited(agent: Agent, event: WorkerExited, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table) as running if table.generation == event.generation:
            return _exited_while_running(agent, running, event, now_s)
        case Stopping(table=table) as stopping if table.generation == event.generation:
            if event.local_rank in stopping.live:
                return _exited_while_stopping(agent, stopping, event, now_s)
    return agent, ()


def _exited_while_running(agent: Agent, running: Running, event: WorkerExited, now_s: float) -> Step:
    rest, failure = _without(running, event.local_rank), event.failure
    if event.local_rank in running.words.stopped and event.code in STOPPED_CODES:
        if failure is None and rest.live:
            return replace(agent, phase=rest), ()
        held = running.held or Held(failure, now_s + STOPPED_HOLD_S, is_stop=True)
        return replace(agent, phase=replace(rest, held=held)), ()
    if failure is None:
        if rest.live or running.held:
            return replace(agent, phase=rest), ()
        return go_on_stopping(agent, Stopping(running.table, rest.live, now_s, done=True))
    if -event.code in ASKING and not (running.held and running.held.is_stop):
        held = running.held or Held(failure, now_s + HOLD_S)
        return replace(agent, phase=replace(rest, held=held)), ()
    return _fail(agent, rest, _cause(running, failure), now_s)


def _cause(running: Running, failure: Failure) -> Failure:
    """Of a failure and what is held, the one that came first; who stopped at a step boundary has not failed."""
    held = running.held
    return held.failure if held and held.failure and not held.is_stop else failure


def raised(agent: Agent, event: WorkerRaised, now_s: float) -> Agent:
    match agent.phase:
        case Running(table=table, live=live) as running if table.generation == event.generation:
            if event.local_rank in live:
                leaving = (event.local_rank, now_s + agent.times.stop_grace_s)
                return replace(agent, phase=replace(running, leaving_s=(*running.leaving_s, leaving)))
    return agent


def reported(agent: Agent, event: Reported, now_s: float) -> Step:
    """Another look at the links: whether workers that report hang."""
    match agent.phase:
        case Running(table=table, quiet=quiet) as running if table.generation == event.generation:
            quiet = quiet.after(event.reports, now_s)
            limit_s = agent.times.hang_timeout_s
            awaited = running.live & event.reporting and not (running.held or running.leaving_s)
            if quiet.is_over or not limit_s or quiet.quiet_s < limit_s or not awaited:
                return replace(agent, phase=replace(running, quiet=quiet)), ()
            agent = replace(agent, phase=replace(running, quiet=replace(quiet, is_over=True)))
            hearing = running.live & running.words.hearing
            return agent, (TakeStacks(table.generation, running.live, hearing, quiet.quiet_s),)
    return agent, ()


def hung(agent: Agent, event: WorkersHung, now_s: float) -> Step:
    """The stacks of workers that hang are taken: from here on it is a failure like any other."""
    match agent.phase:
        case Running(table=table) as running if table.generation == event.generation:
            return _fail(agent, running, _cause(running, event.failure), now_s)
    return agent, ()


def service_lost(agent: Agent, event: ServiceLost, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table) as running if table.generation == event.generation:
            rest = replace(running, live=frozenset()) if event.workers_too else running
            return _fail(agent, rest, _cause(running, event.failure), now_s)
        case Stopping(table=table, live=live) as stopping if table.generation == event.generation:
            if event.workers_too and live:
                return go_on_stopping(agent, replace(stopping, live=frozenset()))
    return agent, ()


def running_deadline_s(phase: Phase) -> float | None:
    match phase:
        case Running(held=held, leaving_s=leaving_s) if held or leaving_s:
            return min([*([held.until_s] if held else []), *(until_s for _, until_s in leaving_s)])
    return None


def tick_running(agent: Agent, running: Running, now_s: float) -> Step:
    held = running.held
    if held and now_s >= held.until_s:
        if held.failure:
            return _fail(agent, running, held.failure, now_s)
        return go_on_stopping(agent, Stopping(running.table, running.live, now_s, done=True))
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


def _fail(agent: Agent, running: Running, failure: Failure, now_s: float) -> Step:
    """Open the next generation together with the failure that is its cause, then stop who lives."""
    live = running.live
    if failure.kind is FailureKind.STARTUP and running.is_first and running.table.progressed:
        return _bow_out(agent, running, failure, now_s)
    which = "worker" if failure.local_rank in live else "other"
    stopped = f"; stopping {len(live)} {which}{'s' if len(live) > 1 else ''}" if live else ""
    actions = (Commit(transactions.fail(agent.snapshot, agent.me, failure)), Say(failure.sentence + stopped))
    stopping = replace(Stopping.of(running, now_s, agent.times.failure_grace_s), failure=failure)
    return stop_broken(agent, stopping, actions)


def _bow_out(agent: Agent, running: Running, failure: Failure, now_s: float) -> Step:
    """A newcomer whose workers cannot even start has something wrong that the healthy job has not: it goes."""
    reason = "it never got past its start on this node, while the job ran on others; they go on without it"
    outcome = agent.outcome(OutcomeKind.FAILED, reason, failure=failure)
    farewell = goodbye(agent, opens=True, why="its workers could not start")
    stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=outcome)
    agent, actions = stop_broken(agent, stopping, (Say(failure.sentence), *farewell))
    return agent.as_member(is_member=False), actions


def _exited_while_stopping(agent: Agent, stopping: Stopping, event: WorkerExited, now_s: float) -> Step:
    stopping = replace(stopping, live=stopping.live - {event.local_rank})
    if stopping.then and not stopping.live:
        stopping = replace(stopping, kill_at_s=min(stopping.kill_at_s, now_s + LAST_WORDS_S))
    if not event.failure or _by_us(event, event.failure, stopping):
        return go_on_stopping(agent, stopping)
    if stopping.failure:
        stopping = replace(stopping, others=(*stopping.others, event.failure))
        return go_on_stopping(agent, stopping)
    generation = agent.snapshot.generation
    if stopping.then and not stopping.is_broken and event.local_rank not in stopping.words.stopped:
        # Whoever was asked to stop after a step waits for this one in vain.
        return stop_broken(agent, stopping)
    if stopping.then or generation is None or not _is_own_doing(event.failure):
        return go_on_stopping(agent, stopping)
    stopping = replace(stopping, failure=event.failure)
    actions = (Commit(transactions.fail(agent.snapshot, agent.me, event.failure)), Say(event.failure.sentence))
    if generation.kind.is_urgent:
        # Another node spoke first; it may have told of nothing but this end.
        return go_on_stopping(agent, stopping, actions)
    # It was to stop for a join or a leave; now its peers wait for it in vain, and must be told to hurry.
    return stop_broken(agent, stopping.hurried(now_s, agent.times.failure_grace_s), actions)


def _by_us(event: WorkerExited, failure: Failure, stopping: Stopping) -> bool:
    """Whether a worker that ended while we were stopping ended of the signal that it got.

    One whose program had raised was on its way out: the signal found it there.
    """
    if failure.kind not in (FailureKind.SIGNAL, FailureKind.EXIT_CODE):
        return False
    is_killed = stopping.killed or event.local_rank in stopping.spent
    has_stopped = event.local_rank in stopping.words.stopped and event.code in STOPPED_CODES
    # By another node's notice, if not by SIGTERM.
    signum = stopping.notice or SIGTERM
    is_asked = event.code in (-SIGTERM, 128 + SIGTERM, -signum, 128 + signum)
    return has_stopped or is_asked or (event.code == -SIGKILL and is_killed)


def _is_own_doing(failure: Failure) -> bool:
    """Whether no peer's end can be behind it; of a bare exit code nobody can say."""
    return failure.kind not in (FailureKind.PEER_LOST, FailureKind.EXIT_CODE)
