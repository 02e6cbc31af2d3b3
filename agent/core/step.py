"""The agent's decisions: `step(agent, event, now_s) -> (agent, actions)`, without I/O.

`table.py` says which function decides, for each phase and event.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core import clearing, running
from elaunch.agent.core.actions import Say
from elaunch.agent.core.events import Cleared, Committed, Event, Leased, Looked, Tick, WorkerEvent
from elaunch.agent.core.membership import attend
from elaunch.agent.core.phases import Clearing, Exited, Phase, Running, Stopping
from elaunch.agent.core.state import Agent, Step
from elaunch.agent.core.store_outage import gives_up_at_s
from elaunch.agent.core.table import TABLE


def step(agent: Agent, event: Event, now_s: float) -> Step:
    """What the agent becomes and does when `event` happens at `now_s` (monotonic)."""
    agent, actions = _step(agent, event, now_s)
    if agent.unsaid is None:
        return agent, actions
    # Only a lost peer needs this rule: see needed_later.py.
    from elaunch.agent.core.first_cause import in_order

    return in_order(agent, actions, now_s)


def _step(agent: Agent, event: Event, now_s: float) -> Step:
    phase = agent.phase
    if isinstance(phase, Exited) or _is_of_another_generation(phase, event):
        return agent, ()
    if isinstance(event, Looked):
        agent, actions = _look(replace(agent, snapshot=event.snapshot), now_s)
        unreadable = (Say(f"{sentence}; going on without it", "warning") for sentence in event.snapshot.unreadable)
        return agent, (*unreadable, *actions)
    agent, actions = TABLE[type(phase)][type(event)](agent, phase, event, now_s)
    if not _is_to_look(agent, phase, event, now_s):
        return agent, actions
    agent, more = _look(replace(agent, lead_at_s=None) if isinstance(event, Tick) else agent, now_s)
    return agent, (*actions, *more)


def deadline_s(agent: Agent) -> float | None:
    """When the agent wants its next `Tick`, or None."""
    if isinstance(agent.phase, Exited):
        return None
    timers_s = (
        _phase_due_s(agent.phase),
        agent.lead_at_s,
        agent.waiting.due_s,
        agent.waiting.invite_s,
        agent.unsaid.until_s if agent.unsaid else None,
        agent.reach.unsaid_until_s,
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


def _is_of_another_generation(phase: Phase, event: Event) -> bool:
    match phase:
        case Running(table=table) | Stopping(table=table) | Clearing(table=table):
            return isinstance(event, WorkerEvent) and event.generation != table.generation
    return False


def _is_to_look(agent: Agent, before: Phase, event: Event, now_s: float) -> bool:
    """Whether what the event changed lets the agent make something else of what the store says."""
    match event:
        case _ if isinstance(agent.phase, Exited):
            return False
        case Leased() | Committed():
            return True
        case Cleared():
            return isinstance(before, Clearing)
        case Tick():
            return agent.lead_at_s is not None and now_s >= agent.lead_at_s
    return False


def _look(agent: Agent, now_s: float) -> Step:
    """Follow what the store says, then write to it what is this node's to write."""
    agent = _note_table(agent, now_s)
    agent, actions = TABLE[type(agent.phase)][Looked](agent, agent.phase, Looked(agent.snapshot), now_s)
    agent, more = attend(agent, now_s)
    return agent, (*actions, *more)


def _note_table(agent: Agent, now_s: float) -> Agent:
    table = agent.snapshot.table
    if table is None or table.generation == agent.table_seen[0]:
        return agent
    return replace(agent, table_seen=(table.generation, now_s))
