"""A store that is away: what is said of it, what the agent's return to it means, and when it is given up."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.events import Action, Say, StoreAway
from elaunch.agent.state import WORTH_A_WORD_S, Agent, Finished, Joining, Reach, Step, exit_with
from elaunch.rendezvous.types import OutcomeKind

# A store that stays away is a long wait: nobody should wonder whether anything still happens.
STILL_AWAY_S = 60.0


def store_away(agent: Agent, event: StoreAway, now_s: float) -> Agent:
    reach = agent.reach
    if reach.away_since_s is not None:
        return replace(agent, reach=replace(reach, why=event.why, is_heads=event.is_heads))
    return replace(agent, reach=Reach(reach.ever, now_s, now_s + WORTH_A_WORD_S, event.why, event.is_heads))


def store_back(agent: Agent, now_s: float) -> Step:
    """Who was cut off sees leases that ended for the same reason as its own might have: it waits for their return."""
    reach = agent.reach
    if reach.away_since_s is None:
        return replace(agent, reach=replace(reach, ever=True)), ()
    was_said, away_s = reach.is_said, now_s - reach.away_since_s
    text = f"the store is back after {away_s:.1f} s" if reach.ever else f"the store answers, after {away_s:.1f} s"
    said: tuple[Action, ...] = (Say(text),) if was_said else ()
    reach = replace(reach, ever=True, away_since_s=None, unsaid_until_s=None, is_said=False)
    lossless_until_s = now_s + agent.times.amnesty_s
    formation = agent.reign.formation.after_absence(away_s, lossless_until_s)
    reign = replace(agent.reign, formation=formation)
    return replace(agent, reach=reach, lossless_until_s=lossless_until_s, reign=reign, lead_at_s=now_s), said


def gives_up_at_s(agent: Agent) -> float | None:
    """When an agent without workers stops waiting for a store that is away."""
    reach = agent.reach
    if reach.away_since_s is None or not isinstance(agent.phase, (Joining, Finished)):
        return None
    is_gone = reach.ever and reach.is_heads
    return reach.away_since_s + (agent.times.store_timeout_s if is_gone else agent.times.join_timeout_s)


def tick_away(agent: Agent, now_s: float) -> Step:
    """Say that the store is away; give up on one that stays so."""
    actions: tuple[Action, ...] = ()
    reach = agent.reach
    if reach.unsaid_until_s is not None and now_s >= reach.unsaid_until_s:
        actions = (*actions, Say(_away(agent, now_s)))
        agent = replace(agent, reach=replace(reach, unsaid_until_s=now_s + STILL_AWAY_S, is_said=True))
    give_up_s = gives_up_at_s(agent)
    if give_up_s is not None and reach.away_since_s is not None and now_s >= give_up_s:
        agent, more = exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, _unknown(agent, now_s - reach.away_since_s)))
        return agent, (*actions, *more)
    return agent, actions


def without_workers(agent: Agent, now_s: float) -> Agent:
    """This node has no workers any more: what was said of an absent store, that they go on, is said anew."""
    reach = agent.reach
    if not reach.is_said or not isinstance(agent.phase, (Joining, Finished)):
        return agent
    return replace(agent, reach=replace(reach, unsaid_until_s=now_s))


def _away(agent: Agent, now_s: float) -> str:
    """What an absent store means for this node now, and how long that may last."""
    reach, give_up_s = agent.reach, gives_up_at_s(agent)
    left = f"for up to {give_up_s - now_s:.0f} s more" if give_up_s is not None else ""
    match agent.phase:
        case Joining() if not reach.ever:
            return f"waiting for the store {left}: {reach.why}; is it running there, and is --rdzv-endpoint right?"
        case Joining():
            meanwhile = f"no worker can start before it is back; trying {left}"
        case Finished():
            meanwhile = f"this node's workers are done, and how the job ends is asked there, {left}"
        case _:
            meanwhile = "trying again; the workers go on"
    return f"the store is away: {reach.why}; {meanwhile}"


def _unknown(agent: Agent, away_s: float) -> str:
    how = "did not answer" if agent.reach.ever else "was never reached"
    own = "; this node's workers had all exited with 0" if isinstance(agent.phase, Finished) else ""
    return f"the store {how} for {away_s:.0f} s ({agent.reach.why}){own}; how the job ended is not known here"
