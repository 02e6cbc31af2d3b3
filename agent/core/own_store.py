"""The job's store, which this host served, is gone: what that means for this node.

The store was a child of this agent and kept everything in its memory. So it never comes back, and this agent sees its
end at once. Running workers do not need the store. But no worker can be restarted and no node can join any more, so
this node's part of the job ends with its workers.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Say
from elaunch.agent.core.events import OwnStoreLost
from elaunch.agent.core.phases import Clearing, Finished, Joining, Running, Stopping, WorkersStopped
from elaunch.agent.core.state import Agent, Step, exit_with
from elaunch.rendezvous.types import OutcomeKind, RankTable


def lost_with_workers(agent: Agent, _phase: Running | Stopping | Clearing, event: OwnStoreLost, _now_s: float) -> Step:
    """Go on: the workers need no store. This node's part of the job ends with them."""
    said = Say(f"{event.why}; the workers go on, but none can be restarted, and no node can join", "error")
    return _without_store(agent, event), (said,)


def lost_without_workers(agent: Agent, _phase: Joining | Finished, event: OwnStoreLost, _now_s: float) -> Step:
    """Exit: nothing more can be done here without the store."""
    return end_if_store_is_gone(_without_store(agent, event))


def end_if_store_is_gone(agent: Agent) -> Step:
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


def last_if_store_is_gone(agent: Agent, clearing: Clearing) -> Clearing:
    """The stop as the last one if it follows a failure: without the store nothing can be restarted."""
    failures = clearing.ended.failures if isinstance(clearing.ended, WorkersStopped) else ()
    if not agent.store_gone or clearing.then or not failures:
        return clearing
    why = f"{agent.store_gone}, so nothing can be restarted"
    return replace(clearing, then=agent.outcome(OutcomeKind.FAILED, why, failure=failures[0]))


def _without_store(agent: Agent, event: OwnStoreLost) -> Agent:
    """This store is not away for a time but gone: lines about its absence end here."""
    reach = replace(agent.reach, failing_since_s=None, silent_since_s=None, unsaid_until_s=None, said=frozenset())
    return replace(agent, store_gone=event.why, reach=reach)


def _not_done(agent: Agent, table: RankTable) -> list[str]:
    """The other nodes of this generation that this node does not know as done."""
    done = agent.snapshot.done.get(table.generation, frozenset())
    return [seat.node_id for seat in table.seats if seat.node_id not in done and seat.node_id != agent.me.node_id]
