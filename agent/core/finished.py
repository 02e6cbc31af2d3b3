"""Phase FINISHED: all workers of this node exited with 0; it stays until the job has ended."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.actions import Commit, Say
from elaunch.agent.core.early_ends import report_ends
from elaunch.agent.core.events import Looked, StoreLost
from elaunch.agent.core.membership import belongs_to_run, join_again, loss_of_keys
from elaunch.agent.core.phases import Finished
from elaunch.agent.core.state import Agent, Step, exit_with
from elaunch.rendezvous.rules.transactions import report_done
from elaunch.rendezvous.types import OutcomeKind


def looked(agent: Agent, finished: Finished, _event: Looked, _now_s: float) -> Step:
    """Join again where a newer generation was opened; exit if the job has ended."""
    snapshot, generation, lost = agent.snapshot, agent.snapshot.generation, loss_of_keys(agent)
    if lost:
        return exit_with(agent, lost)
    if generation is None:
        return agent, ()
    if snapshot.ended and belongs_to_run(agent):
        return exit_with(agent, snapshot.ended)
    if generation.number <= finished.table.generation:
        if snapshot.generation_revision == finished.reported:
            return agent, ()
        # The key was written over, and restored: the guard of the report may not have held.
        done = Commit(report_done(snapshot, agent.me, finished.table.generation))
        return replace(agent, phase=replace(finished, reported=snapshot.generation_revision)), (done,)
    told = report_ends(agent, finished.table.generation, finished.ends)
    return join_again(agent, finished.table.generation), (*told, Say(f"running again: {generation.cause}"))


def store_lost(agent: Agent, _finished: Finished, event: StoreLost, _now_s: float) -> Step:
    """Exit: how the job ends is not known here."""
    return exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, event.why))
