"""How a node leaves the job, or ends or restarts it: by a signal to the agent, or by a person's order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from signal import SIGINT, SIGPIPE

from elaunch.agent.core.actions import Action, Commit
from elaunch.agent.core.events import ENDS_JOB, SHELL_BASE, RestartOrdered, Signalled
from elaunch.agent.core.state import Agent, Exited, Finished, Joining, Running, Step
from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.queries import Topic
from elaunch.rendezvous.types import Outcome, OutcomeKind


def signalled(agent: Agent, _: Joining | Finished, event: Signalled, now_s: float) -> Step:
    """Leave the job, or end it for all nodes (SIGINT), and exit."""
    return leave(take_signal(agent, event), event)


def take_signal(agent: Agent, event: Signalled) -> Agent:
    """Note a person's SIGINT."""
    return replace(agent, is_interrupted=True) if event.signum == SIGINT else agent


def leave(agent: Agent, event: Signalled) -> Step:
    """Exit for a signal, where no worker runs."""
    outcome = interrupted(agent, event)
    agent, farewell = say_goodbye(agent, outcome)
    return replace(agent, phase=Exited(outcome)), farewell


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


@dataclass(frozen=True)
class OrderResponse:
    """Whether the job does as ordered, and a sentence about it for the person."""

    is_done: bool
    text: str


def order(agent: Agent, topic: Topic) -> tuple[Signalled | RestartOrdered | None, OrderResponse]:
    """The event to take, if any, and the answer."""
    snapshot, phase = agent.snapshot, agent.phase
    if ended := agent.ending or snapshot.ended:
        # A second SIGINT would kill workers that save.
        return None, OrderResponse(topic is Topic.STOP, f"the job ends already: {ended.reason}")
    job = job_name(snapshot.keys.run_id)
    has_others = agent.spec.nodes_max > 1
    is_away = has_others and agent.reach.failing_since_s is not None
    if topic is Topic.STOP:
        where = " on all nodes" if has_others else ""
        where = " on this node; the store is away, so stop the other nodes there" if is_away else where
        grace = f"workers have {agent.times.stop_grace_s:g} s to save; the job's exit code is {SHELL_BASE + SIGINT}"
        return Signalled(SIGINT, "elaunch stop", is_order=True), OrderResponse(True, f"{job} stops{where}: {grace}")
    if agent.spec.max_restarts == 0:
        why = "it has one generation, since it was started with --max-restarts 0; stop it and start it again"
        return None, OrderResponse(False, why)
    if is_away:
        return None, OrderResponse(False, "the job's store is away, and without it no generation can be opened")
    opened, table = snapshot.generation, snapshot.current_table
    # What joins has no workers, and those of other nodes run: it is a spare, or waits for its seat.
    if not isinstance(phase, (Joining, Running, Finished)) or opened is None or table is None:
        generation = f"generation {opened.number + bool(table)}" if opened else "the first generation"
        return None, OrderResponse(False, f"no workers run now: {generation} is about to start")
    number = opened.number + 1
    return RestartOrdered(), OrderResponse(True, f"{job}: all workers stop, and start again as generation {number}")


def restart(agent: Agent, _: Joining | Running | Finished, _event: RestartOrdered, _now_s: float) -> Step:
    """Open a new generation on all nodes; it is not counted against the budget."""
    if agent.snapshot.current_table is None:
        return agent, ()
    return agent, (
        Commit(transactions.open_restart(agent.snapshot, f"elaunch restart was received by {agent.me.host}")),
    )
