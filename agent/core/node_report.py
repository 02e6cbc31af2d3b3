"""What an agent says of its node when it is asked; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaunch.agent.core.phases import Clearing, Exited, Finished, Joining, Running, Stopping
from elaunch.agent.core.state import Agent
from elaunch.rendezvous.rules.reports import RANKS_MAX, NodeReport, RankReport


@dataclass(frozen=True)
class WorkersSeen:
    """The workers of `generation`, started `age_s` ago, as their links and their fork server show them."""

    generation: int
    age_s: float
    ranks: tuple[RankReport, ...]


def node_report(agent: Agent, pid: int, age_s: float, seen: WorkersSeen | None) -> NodeReport:
    """The report of the node. `pid` is the agent's process, which began `age_s` ago. `seen` is None before a start."""
    (state, live), reach = _state(agent), agent.reach
    report = NodeReport(
        agent.me.node_id,
        agent.me.host,
        pid,
        state,
        age_s,
        waiting=agent.waiting.text,
        trouble="" if reach.failing_since_s is None else f"the store {reach.trouble.value}: {reach.why}",
    )
    if seen is None:
        return report
    gone = "done" if state == "done" else "exited"
    ranks = tuple(
        replace(rank, state=gone) if rank.local_rank not in live
        # The fork server still imports.
        else replace(rank, state="starting") if rank.pid <= 0
        else rank
        for rank in seen.ranks[:RANKS_MAX]
    )  # fmt: skip
    return replace(report, generation=seen.generation, workers_age_s=seen.age_s, ranks=ranks)


def _state(agent: Agent) -> tuple[str, frozenset[int]]:
    """One word for the phase, and the local ranks that run."""
    match agent.phase:
        case Joining():
            return "waiting", frozenset()
        case Running(live=live):
            return "running", live
        case Stopping(live=live):
            return "stopping", live
        case Clearing():
            return "stopping", frozenset()
        case Finished():
            return "done", frozenset()
        case Exited():
            return "ended", frozenset()
