"""The lease on which this node's keys stand: taken, lost, and begun again."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Renew
from elaunch.agent.core.events import Leased, LeaseLost
from elaunch.agent.core.phases import Phase
from elaunch.agent.core.state import Agent, Claim, Step


def leased(agent: Agent, _phase: Phase, event: Leased, now_s: float) -> Step:
    """Take the new lease; a node with workers comes back by it as the same node."""
    return agent.as_member(lease=event.lease, next_id=event.node_id, begun_s=now_s), ()


def lease_lost(agent: Agent, _phase: Phase, event: LeaseLost, now_s: float) -> Step:
    """Begin another lease; nobody is declared lost for a while, as others may have been cut off, too."""
    if event.lease != agent.membership.lease:
        return agent, ()
    agent = agent.as_member(lease=0, is_member=False, evicted=False, claim=Claim.UNTRIED)
    # A lease that ends again and again would hide each loss for ever.
    if now_s >= agent.lossless_until_s + agent.times.return_grace_s:
        agent = replace(agent, lossless_until_s=now_s + agent.times.return_grace_s)
    if agent.is_going:
        return agent, ()
    if now_s >= agent.membership.begun_s + agent.times.keepalive_s:
        return agent, (Renew(),)
    # Leases that end at once, as by another client of the store, would be as many requests as the store can answer.
    agent = agent.as_member(renew_at_s=now_s + agent.times.keepalive_s)
    return replace(agent, lead_at_s=agent.membership.renew_at_s), ()


def renew_when_due(agent: Agent, now_s: float) -> Step:
    """Begin another lease, if this node has waited for that long enough."""
    due_s = agent.membership.renew_at_s
    if due_s is None:
        return agent, ()
    if now_s < due_s:
        return replace(agent, lead_at_s=due_s), ()
    return agent.as_member(renew_at_s=None), (Renew(),)
