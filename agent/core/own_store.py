"""The job's store, which this host served, is gone: what that means for this node.

The store was a child of this agent and kept everything in its memory. So it never comes back, and this agent sees its
end at once. Running workers do not need the store. But no worker can be restarted and no node can join any more, so
this node's part of the job ends with its workers.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.events import OwnStoreLost, Say
from elaunch.agent.core.state import Agent, Finished, Joining, Running, Step, Stopping, exit_with
from elaunch.rendezvous.types import OutcomeKind, RankTable


def own_store_lost(agent: Agent, event: OwnStoreLost) -> Step:
    # This store is not away for a time but gone: lines about its absence end here.
    reach = replace(agent.reach, failing_since_s=None, unsaid_until_s=None, is_said=False)
    agent, actions = without_own_store(replace(agent, store_gone=event.why, reach=reach))
    if isinstance(agent.phase, (Running, Stopping)):
        return agent, (Say(f"{event.why}; the workers go on, but none can be restarted, and no node can join"),)
    return agent, actions


def without_own_store(agent: Agent) -> Step:
    """End this node's part of the job if its own store is gone and none of its workers runs."""
    if not agent.store_gone:
        return agent, ()
    match agent.phase:
        case Finished(table=table):
            others = _not_done(agent, table)
            if not others:
                return exit_with(agent, agent.outcome(OutcomeKind.SUCCEEDED, "every worker exited with 0"))
            nodes = "the other node is" if len(others) == 1 else f"{len(others)} other nodes are"
            why = f"this node's workers have all exited with 0, and this node cannot know how {nodes} doing"
        case Joining():
            why = "no worker can start without it"
        case _:
            return agent, ()
    return exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, f"{agent.store_gone}; {why}"))


def last_failure(agent: Agent, stopping: Stopping) -> Stopping:
    """The stop as the last one if it follows a failure: without the store nothing can be restarted."""
    if not agent.store_gone or stopping.then or not stopping.failure:
        return stopping
    why = f"{agent.store_gone}, so nothing can be restarted"
    return replace(stopping, then=agent.outcome(OutcomeKind.FAILED, why, failure=stopping.failure))


def _not_done(agent: Agent, table: RankTable) -> list[str]:
    """The other nodes of this generation that this node does not know as done."""
    done = agent.snapshot.done.get(table.generation, frozenset())
    return [seat.node_id for seat in table.seats if seat.node_id not in done and seat.node_id != agent.me.node_id]
