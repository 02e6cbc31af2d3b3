"""How workers are told to stop: on their links those that listen, the others by a signal."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Action, Clear, Say, SignalWorkers, TellWorkers
from elaunch.agent.core.events import WorkerListens
from elaunch.agent.core.messages import Message, PeerFailed, StopAtStepBoundary, StopReason
from elaunch.agent.core.phases import (
    AtBoundary,
    Broken,
    Clearing,
    LinkWords,
    Running,
    Stopping,
    WorkersDone,
    WorkersStopped,
)
from elaunch.agent.core.signals import SIGKILL, SIGTERM
from elaunch.agent.core.state import Agent, Step

# A worker that listens for failures has at least so long to report that it saves, or has saved.
_LISTENER_S = 2.0


def stop_at_boundary(
    agent: Agent,
    stopping: Stopping,
    reason: StopReason,
    signum: int,
    actions: tuple[Action, ...] = (),
    *,
    until_s: float | None = None,
) -> Step:
    """Ask workers that listen to stop after the same step as all ranks; the others get the signal.

    A worker that has not come to its step's end by `until_s` gets SIGTERM then. None has been told of anything before.
    """
    live, words = stopping.live, stopping.words
    asked = live & words.to_stop
    ended = live - asked
    notice = signum if signum in agent.notices else 0
    mode = AtBoundary(ended, signum, notice, until_s if asked - words.stopped else None)
    return _tell(agent, replace(stopping, mode=mode), asked, StopAtStepBoundary(reason), ended, signum, actions)


def stop_otherwise(
    agent: Agent, stopping: Stopping, reason: StopReason, signum: int, actions: tuple[Action, ...] = ()
) -> Step:
    """Workers that are stopping already are to stop for another reason, with another signal.

    In a broken group there is no step to end, and those that save are left alone.
    """
    live, words, mode, reached = stopping.live, stopping.words, stopping.mode, stopping.reached
    asked = frozenset[int]() if isinstance(mode, Broken) else (live & words.to_stop) - reached
    ended = live - asked - (words.to_failure if isinstance(mode, Broken) else frozenset())
    if isinstance(mode, (AtBoundary, Broken)) and signum == mode.signum and signum in agent.notices:
        # Passed on before from another node, which had it first.
        ended -= reached
    if isinstance(mode, Broken):
        stopping = replace(stopping, mode=Broken(reached | ended, signum, spent=mode.spent))
    else:
        stopping = replace(stopping, mode=AtBoundary(reached | ended, signum))
    return _tell(agent, stopping, asked, StopAtStepBoundary(reason), ended, signum, actions)


def stop_broken(agent: Agent, stopping: Stopping, actions: tuple[Action, ...] = ()) -> Step:
    """After a failure: those that listen for that are told, and save; the others get SIGTERM, if they had no signal.

    A worker that has stopped at a step boundary has saved, or is about to, and ends by itself. So does one whose
    program has returned: a signal would take the place of its exit status.
    """
    left = stopping.live - stopping.words.stopped
    told = left & stopping.words.to_failure
    ended = left - told - stopping.reached - stopping.words.returned
    mode = Broken(stopping.reached | ended, SIGTERM, stopping.mode.notice, stopping.spent)
    message = PeerFailed(stopping.table.generation)
    return _tell(agent, replace(stopping, mode=mode), told, message, ended, SIGTERM, actions)


def grace_of_failure(agent: Agent, group: Running | Stopping) -> float:
    """How long this group's workers have after a failure."""
    return max(agent.times.failure_grace_s, _LISTENER_S if group.live & group.words.to_failure else 0.0)


def past_boundary(agent: Agent, stopping: Stopping, boundary: AtBoundary, now_s: float) -> Step:
    """Those that were to stop at a step boundary have not come to one in time."""
    late, grace_s = stopping.on_the_way, agent.times.stop_grace_s
    mode = replace(boundary, signalled=boundary.signalled | late, until_s=None)
    agent = replace(agent, phase=replace(stopping, mode=mode, due_s=now_s + grace_s, grace_s=grace_s))
    if not late:
        return agent, ()
    text = f"local rank {ranks(late)} came to no step boundary within {agent.times.boundary_wait_s:g} s; SIGTERM"
    return agent, (Say(text, "warning"), SignalWorkers(stopping.table.generation, late, SIGTERM))


def past_grace_of_failure(agent: Agent, stopping: Stopping, broken: Broken, until_s: float) -> Step:
    """Kill all but those that save, which have until then."""
    late = stopping.live - stopping.saving - broken.spent
    mode = replace(broken, spent=broken.spent | late)
    stopped = replace(stopping, mode=mode, due_s=until_s, grace_s=agent.times.stop_grace_s)
    agent = replace(agent, phase=stopped)
    if not late:
        return agent, ()
    text = f"local rank {ranks(late)} still ran after {stopping.grace_s:g} s; SIGKILL"
    return agent, (Say(text, "warning"), SignalWorkers(stopping.table.generation, late, SIGKILL))


def go_on_stopping(agent: Agent, stopping: Stopping, actions: tuple[Action, ...] = ()) -> Step:
    """Wait for the workers that live, or clear up after the last one."""
    if stopping.live:
        return replace(agent, phase=stopping), actions
    ended = WorkersStopped(stopping.failures, stopping.ends, stopping.answered)
    return clear_up(agent, Clearing(stopping.table, stopping.due_s, ended, stopping.then), actions)


def clear_up(agent: Agent, clearing: Clearing, actions: tuple[Action, ...] = ()) -> Step:
    is_done = isinstance(clearing.ended, WorkersDone)
    return replace(agent, phase=clearing), (*actions, Clear(clearing.table.generation, is_done))


def wishes_of(words: LinkWords, event: WorkerListens) -> LinkWords:
    """What the workers have said, with what this one wants to be told from now on."""
    rank = frozenset({event.local_rank})
    return replace(
        words,
        hearing=words.hearing | rank,
        to_stop=words.to_stop | rank if event.to_stop else words.to_stop - rank,
        to_failure=words.to_failure | rank if event.to_failure else words.to_failure - rank,
        saving=words.saving if event.to_failure else words.saving - rank,
    )


def ranks(local_ranks: frozenset[int]) -> str:
    """In words."""
    return ", ".join(str(rank) for rank in sorted(local_ranks))


def _tell(
    agent: Agent,
    stopping: Stopping,
    told: frozenset[int],
    message: Message,
    ended: frozenset[int],
    signum: int,
    actions: tuple[Action, ...],
) -> Step:
    generation = stopping.table.generation
    if stopping.live and told:
        actions = (*actions, TellWorkers(generation, told, message))
    if stopping.live and ended:
        actions = (*actions, SignalWorkers(generation, ended, signum))
    return go_on_stopping(agent, stopping, actions)
