"""What a node does about a slow rank of another node: it tells how long its ranks wait, and hears the verdict."""

from __future__ import annotations

from elaunch.agent.core.actions import Action, Commit, NameSlow, Say
from elaunch.agent.core.events import Paced
from elaunch.agent.core.phases import Running
from elaunch.agent.core.state import Agent, Step
from elaunch.records import replace
from elaunch.rendezvous.rules.pace import is_news, pace_of, slow_node_words, tell_pace


def paced(agent: Agent, running: Running, event: Paced, _now_s: float) -> Step:
    """Tell the leader for which share of the time each rank waits in collectives, if that has changed."""
    table, node_id = running.table, agent.me.node_id
    index = table.group_rank(node_id)
    if len(table.seats) < 2 or index is None or not event.shares:
        return agent, ()
    first_rank = table.seats[index].first_rank
    pace = pace_of(node_id, {first_rank + rank: share for rank, share in event.shares.items()})
    if not is_news(running.pace, pace):
        return agent, ()
    txn = tell_pace(agent.snapshot, agent.me, table.generation, pace)
    return replace(agent, phase=replace(running, pace=pace)), (Commit(txn),)


def hear_of_slow(agent: Agent, running: Running) -> tuple[Running, tuple[Action, ...]]:
    """Say the leader's verdict once: on the node of rank 0, and on the slow one, which looks for the cause."""
    slow = agent.snapshot.slow
    if slow is None or slow.generation != running.table.generation or slow.node_id == running.slow_node:
        return running, ()
    running = replace(running, slow_node=slow.node_id)
    if slow.node_id == agent.me.node_id:
        return running, (NameSlow(slow),)
    if running.table.group_rank(agent.me.node_id) != 0:
        return running, ()
    return running, (Say(f"{slow_node_words(slow)}; the log of that node says what differs there", "warning"),)
