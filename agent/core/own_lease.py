"""The lease on which this node's keys stand: taken, lost, and begun again."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Renew, Say
from elaunch.agent.core.events import Leased, LeaseLost
from elaunch.agent.core.phases import Finished, Joining, Phase
from elaunch.agent.core.state import Agent, Claim, Step, exit_with
from elaunch.rendezvous.types import OutcomeKind

# A lease that ends early is told of again after this time.
_ENDS_EARLY_AGAIN_S = 30.0
# A lease that ends when less than this part of its time has passed since the last renewal has ended early.
_HONEST_PART = 0.8


def leased(agent: Agent, _phase: Phase, event: Leased, _now_s: float) -> Step:
    """Take the new lease; a node with workers comes back by it as the same node."""
    return agent.as_member(lease=event.lease, next_id=event.node_id), ()


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
    if event.held_s > agent.times.lease_ttl_s * _HONEST_PART:
        return agent.as_member(ends_early_since_s=None), (Renew(),)
    return _lease_ended_early(agent, event.held_s, now_s)


def _lease_ended_early(agent: Agent, held_s: float, now_s: float) -> Step:
    """Say that a lease has ended before its time. A node without workers gives up if each new one does so, too.

    A lease can only end early if another client ends it, or if the store or a proxy does not tell the truth.
    """
    member, times = agent.membership, agent.times
    is_again = now_s - member.ended_early_s < _ENDS_EARLY_AGAIN_S
    since_s = member.ends_early_since_s
    agent = agent.as_member(ended_early_s=now_s)
    if since_s is None or not is_again:
        # One may also be a host that slept, whose clock stood still.
        return agent.as_member(ends_early_since_s=now_s), (Renew(),)
    why = (
        f"the store says that this node's lease has ended {held_s:.1f} s after the store renewed it, though it holds"
        f" for {times.lease_ttl_s:g} s: another client of the store ends it, or a proxy answers in the store's place"
    )
    if now_s - since_s >= times.store_wait_s and isinstance(agent.phase, (Joining, Finished)):
        reason = f"{why}; so it was for {now_s - since_s:.0f} s"
        return exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, reason))
    # Leases that end at once would be as many requests as the store can answer.
    agent = agent.as_member(renew_at_s=now_s + times.keepalive_s)
    agent = replace(agent, lead_at_s=agent.membership.renew_at_s)
    if now_s - member.ends_early_said_s < _ENDS_EARLY_AGAIN_S:
        return agent, ()
    return agent.as_member(ends_early_said_s=now_s), (Say(f"{why}; beginning another lease", "warning"),)


def renew_when_due(agent: Agent, now_s: float) -> Step:
    """Begin another lease, if one that ended early has made this node wait with it, and the wait is over."""
    due_s = agent.membership.renew_at_s
    if due_s is None:
        return agent, ()
    if now_s < due_s:
        return replace(agent, lead_at_s=due_s), ()
    return agent.as_member(renew_at_s=None), (Renew(),)
