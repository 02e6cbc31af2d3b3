"""Workers that exited with 0 while other ranks still waited for them: what their agent tells the job, and when."""

from __future__ import annotations

from elaunch.agent.core.actions import Action, Commit
from elaunch.agent.core.state import Agent
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.types import Failure, OpenKind


def report_ends(agent: Agent, generation: int, ends: tuple[Failure, ...]) -> tuple[Action, ...]:
    """If another rank's failure ended the generation, record which worker of this node had exited before.

    The record decides only if all others have lost a peer: then this worker is the peer that they lost.
    """
    newest = agent.snapshot.generation
    if not ends or newest is None or newest.kind is not OpenKind.FAIL or newest.number != generation + 1:
        return ()
    return tuple(map(Commit, transactions.complete(agent.snapshot, agent.me, ends[0])))
