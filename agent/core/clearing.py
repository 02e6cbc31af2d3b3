"""Phases CLEARING and FINISHED: no worker runs; the generation's output is collected, and its failure is explained."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGINT

from elaunch.agent.core.actions import Action, Commit, Log
from elaunch.agent.core.events import Cleared, Signalled, SnapshotChanged, Tick
from elaunch.agent.core.membership import end_of_own_run, join_again, leave, outcome_in_store, take_signal, withdraw
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Step, exit_with
from elaunch.agent.core.store_outage import log_waits, note_idle
from elaunch.agent.diagnosis.causes.table import explained
from elaunch.agent.diagnosis.exit_status import with_tail
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.restart_policy import decisive_failure, is_one_bug, killed_together
from elaunch.rendezvous.types import Failure, FailureKind, OpenKind, Outcome


def report_ends(agent: Agent, generation: int, ends: tuple[Failure, ...]) -> tuple[Action, ...]:
    """If another rank's failure ended the generation, record which worker of this node had exited before.

    The record decides only if all others have lost a peer: then this worker is the peer that they lost.
    """
    newest = agent.snapshot.generation
    if not ends or newest is None or newest.kind is not OpenKind.FAIL or newest.number != generation + 1:
        return ()
    return (Commit(transactions.complete(agent.snapshot, agent.me, ends[0])),)


# After the last worker of a stop has ended, the reader of its output has this time.
OUTPUT_WAIT_S = 2.0


def signalled(agent: Agent, clearing: Clearing, event: Signalled, now_s: float) -> Step:
    """Leave the job, or end it for all nodes (SIGINT), when all is cleared, or soon; a second SIGINT exits now.

    Where all workers exited with 0, that is reported first.
    """
    if event.is_order and agent.is_interrupted:
        return agent, ()
    if event.signum == SIGINT and agent.is_interrupted:
        # Only output is left, and its reader does not read it.
        return exit_with(agent, clearing.then) if clearing.then else (agent, ())
    agent = take_signal(agent, event)
    newest, actions = agent.snapshot.generation, tuple[Action, ...]()
    match clearing:
        case Clearing(then=None, is_done=True) if newest and newest.number == clearing.table.generation:
            agent, actions = _go_on(agent, clearing)
            # The job of a single node has ended well then.
            if agent.spec.nodes_max > 1:
                agent, left = leave(agent, clearing, event, now_s)
                actions = (*actions, *left)
        case Clearing(then=None):
            agent, actions, outcome = withdraw(agent, event)
            agent = replace(agent, phase=replace(clearing, then=outcome, until_s=now_s + OUTPUT_WAIT_S))
        case Clearing(then=Outcome() as then) if event.signum == SIGINT:
            agent, actions = end_of_own_run(agent, clearing.table.generation, event)
            agent = replace(agent, phase=Exited(then))
    return agent, actions


def tick(agent: Agent, clearing: Clearing, _: Tick, now_s: float) -> Step:
    """Wait no longer for output, where the agent is to exit."""
    agent, logged = log_waits(agent, now_s)
    if clearing.then is None or now_s < clearing.until_s:
        return agent, logged
    # Only output is left, and its reader does not read it.
    return replace(agent, phase=Exited(clearing.then)), logged


def cleared(agent: Agent, clearing: Clearing, event: Cleared, now_s: float) -> Step:
    """Complete the record of the failure; then exit, be finished, or join the newest generation."""
    agent = replace(agent, progressed=event.progressed)
    agent, actions, then = _complete(agent, clearing, event)
    agent, more = exit_with(agent, then) if then else _go_on(agent, clearing)
    return note_idle(agent, now_s), (*actions, *more)


def _go_on(agent: Agent, clearing: Clearing) -> Step:
    """Be finished, or join again."""
    newest, number = agent.snapshot.generation, clearing.table.generation
    if clearing.is_done and newest and newest.number == number:
        done = Commit(transactions.report_done(agent.snapshot, agent.me, number))
        finished = Finished(clearing.table, clearing.ends, agent.snapshot.generation_revision)
        return replace(agent, phase=finished), (done,)
    return join_again(agent, number), ()


def _complete(agent: Agent, clearing: Clearing, event: Cleared) -> tuple[Agent, tuple[Action, ...], Outcome | None]:
    """The record of the failure: the output, which has arrived now, may show that an exit only reported a lost peer."""
    then, failures = clearing.then, clearing.failures

    def whole_of(failure: Failure) -> Failure:
        return with_tail(failure, event.tails.get(failure.local_rank, ""))

    def with_cause(failure: Failure) -> Failure:
        return explained(failure, event.facts, clearing.table.mismatch)

    if not failures:
        # The outcome of a node that withdraws alone.
        if then and then.failure and then.failure.node_id == agent.me.node_id:
            then = replace(then, failure=with_cause(whole_of(then.failure)))
        return agent, report_ends(agent, clearing.table.generation, clearing.ends), then
    first = failures[0]
    # The others are known to have lost it, or came later: no report has what is known of their causes.
    known = [*map(whole_of, failures), *map(whole_of, clearing.ends)]
    # Of an exit code alone. Its output may show an exception, which our signal did not cause.
    known = [f for f in known if f.kind is not FailureKind.EXIT_CODE or f.local_rank not in clearing.answered] or known
    cause = killed_together(with_cause(decisive_failure(known)), known)
    cause = replace(cause, ranks_alike=len({each.rank for each in known if is_one_bug(cause, each)}) or 1)
    actions: tuple[Action, ...] = (Commit(transactions.complete(agent.snapshot, agent.me, cause)),)
    if cause.local_rank != first.local_rank:
        # A worker that dies while it writes to a disk is gone later than its peers notice and give up.
        actions = (*actions, Log(f"the cause: {cause.sentence}", "error"))
    agent = replace(agent, last_failure=cause)
    return agent, actions, replace(then, failure=cause) if then and then.failure == first else then


def finished_snapshot_changed(agent: Agent, finished: Finished, _event: SnapshotChanged, _now_s: float) -> Step:
    """Join again where a newer generation was opened; exit if the job has ended."""
    snapshot, generation = agent.snapshot, agent.snapshot.generation
    if outcome := outcome_in_store(agent):
        return exit_with(agent, outcome)
    if generation is None:
        return agent, ()
    if generation.number <= finished.table.generation:
        if snapshot.generation_revision == finished.reported:
            return agent, ()
        # The key was written over, and restored: the guard of the report may not have held.
        done = Commit(transactions.report_done(snapshot, agent.me, finished.table.generation))
        return replace(agent, phase=replace(finished, reported=snapshot.generation_revision)), (done,)
    records = report_ends(agent, finished.table.generation, finished.ends)
    return join_again(agent, finished.table.generation), (*records, Log(f"running again: {generation.cause}"))
