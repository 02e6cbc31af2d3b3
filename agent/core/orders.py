"""What a person types for the whole job, `elaunch stop` and `elaunch restart`: what an agent makes of it; pure."""

from __future__ import annotations

from dataclasses import dataclass

from elaunch.agent.core.actions import Commit
from elaunch.agent.core.events import RestartOrdered, Signalled
from elaunch.agent.core.phases import Clearing, Exited, Finished, Joining, Running, Stopping
from elaunch.agent.core.signals import SHELL_BASE, SIGINT
from elaunch.agent.core.state import Agent, Step
from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.questions import Topic
from elaunch.rendezvous.types import Outcome


@dataclass(frozen=True)
class OrderAnswer:
    """Whether the job does as ordered, and a sentence about it for the person."""

    is_done: bool
    text: str


def order(agent: Agent, topic: Topic) -> tuple[Signalled | RestartOrdered | None, OrderAnswer]:
    """The event to take, if any, and the answer."""
    snapshot, phase = agent.snapshot, agent.phase
    match phase:
        case Exited(outcome) | Stopping(then=Outcome() as outcome) | Clearing(then=Outcome() as outcome):
            # A second SIGINT would kill workers that save.
            return None, OrderAnswer(topic is Topic.STOP, f"the job ends already: {outcome.reason}")
    if snapshot.ended:
        return None, OrderAnswer(topic is Topic.STOP, f"the job ends already: {snapshot.ended.reason}")
    job = job_name(snapshot.keys.run_id)
    has_others = agent.spec.nodes_max > 1
    is_away = has_others and (agent.reach.failing_since_s is not None or bool(agent.store_gone))
    if topic is Topic.STOP:
        where = " on all nodes" if has_others else ""
        where = " on this node; the store is away, so stop the other nodes there" if is_away else where
        grace = f"workers have {agent.times.stop_grace_s:g} s to save; the job's exit code is {SHELL_BASE + SIGINT}"
        return Signalled(SIGINT, "elaunch stop", is_order=True), OrderAnswer(True, f"{job} stops{where}: {grace}")
    if agent.spec.max_restarts == 0:
        why = "it has one generation, since it was started with --max-restarts 0; stop it and start it again"
        return None, OrderAnswer(False, why)
    if is_away:
        return None, OrderAnswer(False, "the job's store is away, and without it no generation can be opened")
    opened, table = snapshot.generation, snapshot.current_table
    # What joins has no workers, and those of other nodes run: it is a spare, or waits for its seat.
    if not isinstance(phase, (Joining, Running, Finished)) or opened is None or table is None:
        generation = f"generation {opened.number + bool(table)}" if opened else "the first generation"
        return None, OrderAnswer(False, f"no workers run now: {generation} is about to start")
    number = opened.number + 1
    return RestartOrdered(), OrderAnswer(True, f"{job}: all workers stop, and start again as generation {number}")


def restart(agent: Agent, _: Joining | Running | Finished, _event: RestartOrdered, _now_s: float) -> Step:
    """Open a new generation on all nodes; it is not counted against the budget."""
    if agent.snapshot.current_table is None:
        return agent, ()
    return agent, (
        Commit(transactions.open_restart(agent.snapshot, f"elaunch restart was received by {agent.me.host}")),
    )
