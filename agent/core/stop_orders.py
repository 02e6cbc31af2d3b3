"""How workers are told to stop: on their links those that listen, the others by a signal; and what they answer."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.events import (
    Action,
    Clear,
    Say,
    SignalWorkers,
    TellWorkers,
    WorkerListens,
    WorkerSaved,
    WorkerSaving,
    WorkerStopped,
)
from elaunch.agent.core.messages import Message, PeerFailed, StopAtStepBoundary, StopReason
from elaunch.agent.core.state import Agent, Running, Step, Stopping, Words

SIGINT, SIGKILL, SIGTERM = 2, 9, 15
# From the first node of a job that has one to the last.
NOTICE_S = 1.0


def stop_at_boundary(
    agent: Agent,
    stopping: Stopping,
    reason: StopReason,
    signum: int,
    actions: tuple[Action, ...] = (),
    *,
    until_s: float | None = None,
    notice_at_s: float | None = None,
) -> Step:
    """Ask who listens to stop after the same step as all ranks; the others get the signal, at `notice_at_s` if given.

    Who has not come to its step's end by `until_s` gets SIGTERM then. In a broken group there is no such step: who
    saves is left alone.
    """
    live, words = stopping.live, stopping.words
    asked = frozenset() if stopping.is_broken else (live & words.to_stop) - stopping.reached
    ended = live - asked - (words.to_failure if stopping.is_broken else frozenset())
    if signum == stopping.signum and signum in agent.notices:
        # Passed on before from another node, which had it first.
        ended -= stopping.reached
    boundary_until_s = until_s if asked - words.stopped else None
    if notice_at_s is not None and boundary_until_s is not None:
        notice_at_s = min(notice_at_s, boundary_until_s)
    stopping = replace(
        stopping,
        signalled=stopping.reached | ended,
        signum=signum,
        notice=signum if notice_at_s is not None else 0,
        notice_at_s=notice_at_s if ended else None,
        boundary_until_s=boundary_until_s,
    )
    now = frozenset() if stopping.notice_at_s is not None else ended
    return _tell(agent, stopping, asked, StopAtStepBoundary(reason), now, signum, actions)


def pass_notice_on(agent: Agent, stopping: Stopping) -> Step:
    """Give the workers what waits for them: this node's own notice has come, or its time is over."""
    told = (stopping.live & stopping.signalled) - stopping.spent
    asked = told & stopping.words.to_stop
    stopping = replace(stopping, signalled=stopping.signalled - asked, notice_at_s=None)
    return _tell(agent, stopping, asked, StopAtStepBoundary(StopReason.LEAVE), told - asked, stopping.signum, ())


def stop_broken(agent: Agent, stopping: Stopping, actions: tuple[Action, ...] = ()) -> Step:
    """After a failure: who listens for that is told, and saves; the others get SIGTERM, unless they had it already.

    Who has stopped at a step boundary has saved, or is about to, and ends by itself.
    """
    left = stopping.live - stopping.words.stopped
    told = left & stopping.words.to_failure
    ended = left - told - stopping.reached
    stopping = replace(
        stopping,
        is_broken=True,
        signalled=stopping.reached | ended,
        signum=SIGTERM,
        notice_at_s=None,
        boundary_until_s=None,
    )
    return _tell(agent, stopping, told, PeerFailed(stopping.table.generation), ended, SIGTERM, actions)


def past_boundary(agent: Agent, stopping: Stopping, now_s: float) -> Step:
    """Who was to stop at a step boundary has not come to one in time."""
    late, grace_s = stopping.on_the_way, agent.times.stop_grace_s
    stopping = replace(
        stopping,
        signalled=stopping.signalled | late,
        boundary_until_s=None,
        kill_at_s=now_s + grace_s,
        grace_s=grace_s,
    )
    agent = replace(agent, phase=stopping)
    if not late:
        return agent, ()
    text = f"local rank {ranks(late)} came to no step boundary within {agent.times.boundary_wait_s:g} s; SIGTERM"
    return agent, (Say(text), SignalWorkers(stopping.table.generation, late, SIGTERM))


def listens(agent: Agent, event: WorkerListens) -> Step:
    """What a worker wants to be told from now on; who was told what it wants no more gets the signal after all."""
    phase, rank = agent.phase, frozenset({event.local_rank})
    if not isinstance(phase, (Running, Stopping)) or phase.table.generation != event.generation:
        return agent, ()
    words = phase.words
    words = replace(
        words,
        hearing=words.hearing | rank,
        to_stop=words.to_stop | rank if event.to_stop else words.to_stop - rank,
        to_failure=words.to_failure | rank if event.to_failure else words.to_failure - rank,
        saving=words.saving if event.to_failure else words.saving - rank,
    )
    if isinstance(phase, Stopping) and not phase.killed:
        heard = words.to_failure if phase.is_broken else words.to_stop
        deaf = (phase.live & rank) - heard - words.stopped - phase.signalled - phase.spent
        agent = replace(agent, phase=replace(phase, words=words, signalled=phase.signalled | deaf))
        is_now = deaf and phase.notice_at_s is None
        return agent, (SignalWorkers(event.generation, deaf, phase.signum),) if is_now else ()
    return replace(agent, phase=replace(phase, words=words)), ()


def saving(agent: Agent, event: WorkerSaving) -> Agent:
    """A worker saves what the next generation goes on from; it may have begun before this agent heard of a failure."""
    match agent.phase:
        case Running(table=table) | Stopping(table=table) as phase if table.generation == event.generation:
            words = replace(phase.words, saving=phase.words.saving | {event.local_rank})
            return replace(agent, phase=replace(phase, words=words))
    return agent


def past_grace_of_failure(agent: Agent, stopping: Stopping, until_s: float) -> Step:
    """Kill all but those that save, who have until then."""
    late = stopping.live - stopping.saving - stopping.spent
    grace_s, killed_s = agent.times.stop_grace_s, stopping.grace_s
    stopping = replace(stopping, spent=stopping.spent | late, kill_at_s=until_s, grace_s=grace_s)
    agent = replace(agent, phase=stopping)
    if not late:
        return agent, ()
    text = f"local rank {ranks(late)} still ran after {killed_s:g} s; SIGKILL"
    return agent, (Say(text), SignalWorkers(stopping.table.generation, late, SIGKILL))


def stopped(agent: Agent, event: WorkerStopped, now_s: float) -> Agent:
    """A worker has come to the step boundary at which all ranks stop."""
    match agent.phase:
        case Running(table=table, words=words) as running if table.generation == event.generation:
            return replace(agent, phase=replace(running, words=_with_stopped(words, event.local_rank)))
        case Stopping(table=table, words=words) as stopping if table.generation == event.generation:
            stopping = replace(stopping, words=_with_stopped(words, event.local_rank))
            if stopping.live and stopping.boundary_until_s is not None and not stopping.on_the_way:
                # From here on they only save.
                stopping = replace(stopping, boundary_until_s=None).hurried(now_s, agent.times.stop_grace_s)
            return replace(agent, phase=stopping)
    return agent


def saved(agent: Agent, event: WorkerSaved) -> Step:
    """Nothing of a worker that has saved after a failure is needed any more."""
    match agent.phase:
        case Stopping(table=table, is_broken=True, killed=False) as stopping if table.generation == event.generation:
            told = (stopping.live & stopping.words.to_failure) - stopping.words.stopped - stopping.spent
            if event.local_rank in told:
                spent = frozenset({event.local_rank})
                agent = replace(agent, phase=replace(stopping, spent=stopping.spent | spent))
                return agent, (SignalWorkers(event.generation, spent, SIGKILL),)
    return agent, ()


def ranks(local_ranks: frozenset[int]) -> str:
    """In words."""
    return ", ".join(str(rank) for rank in sorted(local_ranks))


def _with_stopped(words: Words, local_rank: int) -> Words:
    return replace(words, stopped=words.stopped | {local_rank})


def _tell(
    agent: Agent,
    stopping: Stopping,
    told: frozenset[int],
    message: Message,
    ended: frozenset[int],
    signum: int,
    actions: tuple[Action, ...],
) -> Step:
    agent, generation = replace(agent, phase=stopping), stopping.table.generation
    if not stopping.live:
        return agent, (*actions, Clear(generation))
    if told:
        actions = (*actions, TellWorkers(generation, told, message))
    if ended:
        actions = (*actions, SignalWorkers(generation, ended, signum))
    return agent, actions
