"""The job's store, which this host served, is gone: what that means for this node.

The store was a child of this agent and kept all in its memory, so it never comes back, and this agent knows it at once.
The workers do not need it. Nobody can be restarted or join any more, so this node's part ends with its workers.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.events import OwnStoreLost, Say
from elaunch.agent.state import Agent, Finished, Joining, Running, Step, Stopping, exit_with
from elaunch.rendezvous.types import OutcomeKind, RankTable


def own_store_lost(agent: Agent, event: OwnStoreLost) -> Step:
    # Nothing more is said of a store that is away for a time: it is not.
    reach = replace(agent.reach, failing_since_s=None, unsaid_until_s=None, is_said=False)
    agent, actions = without_own_store(replace(agent, store_gone=event.why, reach=reach))
    if isinstance(agent.phase, (Running, Stopping)):
        return agent, (Say(f"{event.why}; the workers go on, but none can be restarted, and no node can join"),)
    return agent, actions


def without_own_store(agent: Agent) -> Step:
    """End this node's part where its own store is gone and no worker of it runs."""
    if not agent.store_gone:
        return agent, ()
    match agent.phase:
        case Finished(table=table):
            others = _not_done(agent, table)
            if not others:
                return exit_with(agent, agent.outcome(OutcomeKind.SUCCEEDED, "every worker exited with 0"))
            nodes = "the other node is" if len(others) == 1 else f"{len(others)} other nodes are"
            why = f"this node's workers have all exited with 0, and how {nodes} doing is not known here"
        case Joining():
            why = "no worker can start without it"
        case _:
            return agent, ()
    return exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, f"{agent.store_gone}; {why}"))


def last_failure(agent: Agent, stopping: Stopping) -> Stopping:
    """A failure that ends the job, since nothing can be restarted without the store."""
    if not agent.store_gone or stopping.then or not stopping.failure:
        return stopping
    why = f"{agent.store_gone}, so nothing can be restarted"
    return replace(stopping, then=agent.outcome(OutcomeKind.FAILED, why, failure=stopping.failure))


def _not_done(agent: Agent, table: RankTable) -> list[str]:
    """The other nodes of this generation that had not said that their workers were done, as far as this one knows."""
    done = agent.snapshot.done.get(table.generation, frozenset())
    return [seat.node_id for seat in table.seats if seat.node_id not in done and seat.node_id != agent.me.node_id]
