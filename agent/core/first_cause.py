"""Which failures of one generation a node names: the cause, and only where that is unknown who lost a peer; pure.

A worker that lost a peer is often gone before that peer is, and its agent sees no link of another node. So a line about
a lost peer waits a moment for the cause, which the node of the failed rank writes to the store. Nothing else waits.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Action, Commit, Say
from elaunch.agent.core.phases import Exited, Running
from elaunch.agent.core.state import Agent, Step, Unsaid
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.types import Failure, OpenKind

# A worker that raised an exception needs about half a second until it is gone.
WAIT_S = 2.0


def hold(agent: Agent, generation: int, said: Say, now_s: float) -> Agent:
    """Let `said`, about a failure in `generation` that another one may explain, wait for that one."""
    return replace(agent, unsaid=Unsaid(generation, (said,), now_s + WAIT_S))


def in_order(agent: Agent, actions: tuple[Action, ...], now_s: float) -> Step:
    """Say the lines that wait, if they have waited long enough; if the cause is said now, only --verbose shows them."""
    unsaid = agent.unsaid
    if unsaid is None:
        return agent, actions
    if cause := _cause_elsewhere(agent, unsaid.generation):
        agent, actions = replace(agent, named=cause), (Say(cause, "error"), *_details(unsaid.lines), *actions)
    elif any(isinstance(action, Say) and action.level == "error" for action in actions):
        actions = (*actions, *_details(unsaid.lines))
    elif now_s >= unsaid.until_s or isinstance(agent.phase, (Running, Exited)):
        actions = (*unsaid.lines, *actions)
    else:
        return agent, actions
    return replace(agent, unsaid=None), actions


def _details(lines: tuple[Say, ...]) -> tuple[Say, ...]:
    return tuple(replace(line, level="debug") for line in lines)


def name_cause(agent: Agent, failure: Failure) -> tuple[Action, ...]:
    """Tell the other nodes of this node's failure, if they know only of a rank that lost a peer."""
    opened = agent.snapshot.generation
    is_missed = opened and opened.is_secondary and opened.number == failure.generation + 1
    if not is_missed or failure.kind.is_secondary or agent.spec.nodes_max == 1:
        return ()
    return (Commit(transactions.name_cause(agent.snapshot, failure)),)


def _cause_elsewhere(agent: Agent, generation: int) -> str:
    """The failure on another node that explains those of ranks that lost a peer, as far as the store shows one."""
    snapshot, me = agent.snapshot, agent.me.node_id
    ended, opened = snapshot.ended.failure if snapshot.ended else None, snapshot.generation
    named = (snapshot.causes.get(generation), *snapshot.failures.get(generation, ()), ended)
    others = (each for each in named if each and each.generation == generation and each.node_id != me)
    if cause := next((each for each in others if not each.kind.is_secondary), None):
        return cause.sentence
    is_next = opened and opened.number == generation + 1 and opened.node_id != me
    is_cause = opened and opened.kind is OpenKind.FAIL and not opened.is_secondary
    return opened.cause if opened and is_next and is_cause else ""
