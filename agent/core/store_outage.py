"""What the agent does while the store is unreachable, too slow, or refuses its requests."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Actions, Log
from elaunch.agent.core.events import StoreBack, StoreFailed, Tick, Trouble
from elaunch.agent.core.membership import log_wait
from elaunch.agent.core.state import LOG_AFTER_S, Agent, Finished, Joining, Phase, Reach, Running, Step, exit_with
from elaunch.rendezvous.types import Outcome, OutcomeKind

# While the store is unreachable, its log line is repeated this often, so that the agent does not seem stuck.
STILL_AWAY_S = 60.0
# The hint when the head's store is given up.
_AGAIN = (
    "to start the job again, type its command on all nodes; if the host that served the store stays down, type it on"
    " the others, with one of them in --rdzv-endpoint and as many nodes in --nnodes as are left"
)


def store_failed(agent: Agent, _phase: Phase, event: StoreFailed, now_s: float) -> Step:
    """Note that the store fails; log it if it lasts. Exit if this node was denied before it had entered."""
    if event.trouble is Trouble.DENIED and not agent.membership.has_entered:
        # Rejected on first contact means misconfiguration, not a lost job.
        return exit_with(agent, agent.outcome(OutcomeKind.REFUSED, event.why))
    reach = agent.reach
    if reach.failing_since_s is None:
        reach = Reach(reach.ever, failing_since_s=now_s, log_at_s=now_s + LOG_AFTER_S)
    silent_s = (now_s if reach.silent_since_s is None else reach.silent_since_s) if event.is_silent else None
    return replace(agent, reach=replace(reach, last=event, silent_since_s=silent_s)), ()


def store_back(agent: Agent, _phase: Phase, _event: StoreBack, now_s: float) -> Step:
    """Log for how long the store failed; after a long outage no node is declared lost for `return_grace_s`.

    Other nodes may have lost their leases in the same outage, and get time to return. There is no such pause after an
    outage too short for a lease to expire: it may recur, and would hide a loss for ever.
    """
    reach = agent.reach
    if reach.failing_since_s is None:
        return replace(agent, reach=replace(reach, ever=True)), ()
    away_s, how = now_s - reach.failing_since_s, "is back" if reach.ever else "responds,"
    logged: Actions = (Log(f"the store {how} after {away_s:.1f} s"),) if reach.is_logged else ()
    agent = replace(agent, reach=Reach(ever=True), lead_at_s=now_s)
    if away_s < agent.times.shortest_loss_s:
        return agent, logged
    lossless_until_s = now_s + agent.times.return_grace_s
    formation = agent.leader_state.formation.after_absence(away_s, lossless_until_s)
    leader_state = replace(agent.leader_state, formation=formation)
    return replace(agent, lossless_until_s=lossless_until_s, leader_state=leader_state), logged


def gives_up_at_s(agent: Agent) -> float | None:
    """When an agent stops waiting for a failing store: without workers, or if the head's ranks are lost too."""
    reach, times = agent.reach, agent.times
    is_gone = reach.ever and reach.last.is_heads
    if is_gone and reach.silent_since_s is not None and isinstance(agent.phase, (Joining, Running, Finished)):
        return reach.silent_since_s + times.store_timeout_s
    if reach.failing_since_s is None or not isinstance(agent.phase, (Joining, Finished)):
        return None
    since_s = max(reach.failing_since_s, reach.idle_since_s)
    return since_s + (times.store_timeout_s if is_gone else times.store_wait_s)


def given_up(agent: Agent, now_s: float) -> Outcome | None:
    """The agent's outcome if the store has failed for too long, else None."""
    give_up_s = gives_up_at_s(agent)
    if give_up_s is None or agent.reach.failing_since_s is None or now_s < give_up_s:
        return None
    return agent.outcome(OutcomeKind.UNKNOWN, _unknown(agent, now_s - agent.reach.failing_since_s))


def tick(agent: Agent, _phase: Joining | Finished, _event: Tick, now_s: float) -> Step:
    """Give up on a store that fails for too long."""
    outcome = given_up(agent, now_s)
    return exit_with(agent, outcome) if outcome else (agent, ())


def log_waits(agent: Agent, now_s: float) -> Step:
    """Log what this node has long waited for, and what is wrong with the store, unless it is given up now."""
    if given_up(agent, now_s):
        return agent, ()
    agent, actions = log_wait(agent, now_s)
    if agent.reach.log_at_s is not None and now_s >= agent.reach.log_at_s:
        actions = (*actions, Log(_outage_text(agent, now_s), "warning"))
        agent = replace(agent, reach=replace(agent.reach, is_logged=True, log_at_s=now_s + STILL_AWAY_S))
    return agent, actions


def note_idle(agent: Agent, now_s: float) -> Agent:
    """Note that this node's workers have exited, and log the outage again: its last line is about running workers.

    The time to give up is counted from here, since nothing waited for the store before.
    """
    reach = agent.reach
    if reach.failing_since_s is None or not isinstance(agent.phase, (Joining, Finished)):
        return agent
    log_at_s = now_s if reach.is_logged else reach.log_at_s
    return replace(agent, reach=replace(reach, idle_since_s=now_s, log_at_s=log_at_s))


def _outage_text(agent: Agent, now_s: float) -> str:
    """The log line about a failing store: its effect on this node, and when the agent gives up."""
    reach, give_up_s = agent.reach, gives_up_at_s(agent)
    left = f"for up to {give_up_s - now_s:.0f} s more" if give_up_s is not None else ""
    match agent.phase:
        case Joining() if reach.last.trouble is Trouble.AWAY and not reach.ever:
            hint = agent.only_here or "is it running there, and is --rdzv-endpoint right?"
            return f"waiting for the store {left}: {reach.last.why}; {hint}"
        case Joining():
            meanwhile = f"no worker can start before it is back; trying {left}"
        case Finished():
            meanwhile = f"this node's workers are done, and it waits {left} to read the job's outcome there"
        case Running() if give_up_s is not None:
            meanwhile = (
                f"the workers continue, and are stopped in {give_up_s - now_s:.0f} s if that lasts (store_timeout)"
            )
        case _:
            meanwhile = "trying again; the workers continue"
    return f"the store {reach.last.trouble.value}: {reach.last.why}; {meanwhile}"


def _unknown(agent: Agent, away_s: float) -> str:
    reach = agent.reach
    how = "did not answer" if reach.ever else "was never reached"
    past = {Trouble.REFUSES: "refused", Trouble.DENIED: "refused", Trouble.OWN: "could not be connected to"}
    how = past.get(reach.last.trouble, how)
    own = "; this node's workers had all exited with 0" if isinstance(agent.phase, Finished) else ""
    again = f"; {_AGAIN}" if reach.ever and reach.last.is_heads else ""
    return f"the store {how} for {away_s:.0f} s ({reach.last.why}){own}; how the job ended is not known here{again}"
