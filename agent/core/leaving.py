"""How a node leaves the job, or ends it: what a signal to the agent means, and what the other nodes are told."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Action, Commit, Say
from elaunch.agent.core.events import Signalled
from elaunch.agent.core.phases import Finished, Joining
from elaunch.agent.core.signals import ENDS_JOB, SIGINT, SIGPIPE
from elaunch.agent.core.state import Agent, Step, exit_with
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.types import Outcome, OutcomeKind

_UNHEARD = "so the other nodes may not hear of it: press Ctrl-C there too"


def signalled(agent: Agent, _: Joining | Finished, event: Signalled, now_s: float) -> Step:
    """Leave the job, or end it for all nodes (SIGINT), and exit."""
    agent, unheard = take_signal(agent, event)
    agent, actions = leave(agent, event)
    return agent, (*actions, *unheard)


def take_signal(agent: Agent, event: Signalled) -> Step:
    """Note a person's SIGINT, and say it if the other nodes cannot hear of that now."""
    if event.signum != SIGINT:
        return agent, ()
    is_away = agent.reach.failing_since_s is not None or agent.store_gone
    is_cut_off = is_away and agent.membership.belongs and not agent.snapshot.ended
    said = Say(f"the store {agent.reach.trouble.value}, {_UNHEARD}", "warning")
    return replace(agent, is_interrupted=True), (said,) if is_cut_off and agent.spec.nodes_max > 1 else ()


def leave(agent: Agent, event: Signalled) -> Step:
    """Exit for a signal, where no worker runs."""
    outcome = interrupted(agent, event)
    agent, farewell = say_goodbye(agent, outcome)
    agent, more = exit_with(agent, outcome)
    return agent, (*farewell, *more)


def interrupted(agent: Agent, event: Signalled) -> Outcome:
    where = f" by {agent.me.host}" if agent.spec.nodes_max > 1 else ""
    reason = (
        f"nobody reads its stdout any more{where}" if event.signum == SIGPIPE else f"{event.name} was received{where}"
    )
    return agent.outcome(OutcomeKind.INTERRUPTED, reason, signum=event.signum)


def say_goodbye(agent: Agent, outcome: Outcome) -> Step:
    """Tell the others before touching a worker: what is a person's ends the job; else only this node goes."""
    snapshot = agent.snapshot
    if snapshot.generation is None or snapshot.ended:
        return agent, ()
    if outcome.signum in ENDS_JOB and agent.membership.belongs:
        return agent, (Commit(transactions.end_job(snapshot, outcome)),)
    table = snapshot.current_table
    is_seated = table is not None and table.group_rank(agent.me.node_id) is not None
    opens = is_seated and not isinstance(agent.phase, Finished)
    return agent.as_member(is_member=False), goodbye(agent, opens=opens, why=outcome.reason, signum=outcome.signum)


def end_of_own_run(agent: Agent, generation: int, outcome: Outcome) -> Step:
    """The end of the job for all, unless those that this node leaves have ended it, and others begun another."""
    newest = agent.snapshot.generation
    if newest and newest.number > generation + 1:
        return agent, ()
    return say_goodbye(agent, outcome)


def goodbye(agent: Agent, *, opens: bool, why: str, signum: int = 0) -> tuple[Action, ...]:
    """This node goes, and says so; where it leads, others may do so at once."""
    snapshot = agent.snapshot
    left: tuple[Action, ...] = (Commit(transactions.leave(snapshot, agent.me, opens=opens, why=why, signum=signum)),)
    return (*left, Commit(transactions.resign(snapshot))) if snapshot.leader == agent.me.node_id else left
