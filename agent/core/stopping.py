"""Phases STOPPING, CLEARING and FINISHED: how workers are stopped, and what follows after the last one."""

from __future__ import annotations

import math
from dataclasses import replace
from signal import SIGINT, SIGKILL, SIGPIPE, SIGTERM

from elaunch.agent.core import events
from elaunch.agent.core.actions import (
    Actions,
    Clear,
    Commit,
    Log,
    NotifyWorkers,
    PeerFailed,
    ReplaceForkServer,
    SignalWorkers,
    StopAtStepBoundary,
    StopReason,
)
from elaunch.agent.core.membership import end_of_own_run, join_again, leave, outcome_in_store, withdraw
from elaunch.agent.core.state import Agent, Clearing, Finished, Mode, Running, Step, Stopping, WorkerStatus, exit_with
from elaunch.agent.core.store_outage import note_idle
from elaunch.agent.diagnosis.causes.table import explained
from elaunch.agent.diagnosis.exit_status import with_tail
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.restart_policy import decisive_failure, is_one_bug, killed_together
from elaunch.rendezvous.types import Failure, FailureKind, OpenKind, Outcome, OutcomeKind

# A worker that listens for failures has at least this long to report that it is saving, or has saved.
_LISTENER_S = 2.0
# After the last worker of a stop has exited, the reader of its output has this time.
OUTPUT_WAIT_S = 2.0


def stop_at_boundary(
    agent: Agent, stopping: Stopping, reason: StopReason, signum: int, actions: Actions, until_s: float | None = None
) -> Step:
    """Have workers that listen stop after the same step as all ranks; the others get the signal.

    A worker that has not reached the boundary by `until_s` gets SIGTERM then. None was notified before. In a group
    that has lost a peer no step ends: its workers are stopped as after a failure.
    """
    if stopping.failures:
        return stop_broken(agent, stopping, actions)
    notified = stopping.live & stopping.status.to_stop
    ended = stopping.live - notified
    notice = signum if signum in agent.notices else 0
    until_s = until_s if notified - stopping.status.stopped else None
    stopping = replace(stopping, signalled=ended, signum=signum, notice=notice, until_s=until_s)
    message = NotifyWorkers(stopping.table.generation, notified, StopAtStepBoundary(reason))
    return _notify(agent, stopping, message, ended, actions)


def stop_broken(agent: Agent, stopping: Stopping, actions: Actions = ()) -> Step:
    """Notify the workers that listen for failures, which save; the others get SIGTERM, if they had no signal.

    A worker that has stopped at a step boundary has saved, or is about to, and exits without a signal. So does one
    whose program has returned: a signal would take the place of its exit status.
    """
    left = stopping.live - stopping.status.stopped
    notified = left & stopping.status.to_failure
    ended = left - notified - stopping.signalled - stopping.status.returned
    reached = stopping.signalled | ended
    stopping = replace(stopping, mode=Mode.BROKEN, signalled=reached, signum=SIGTERM, until_s=None)
    generation = stopping.table.generation
    return _notify(agent, stopping, NotifyWorkers(generation, notified, PeerFailed(generation)), ended, actions)


def grace_of_failure(agent: Agent, group: Running | Stopping) -> float:
    """The grace of this group's workers after a failure."""
    return max(agent.times.failure_grace_s, _LISTENER_S if group.live & group.status.to_failure else 0.0)


def continue_stop(agent: Agent, stopping: Stopping, actions: Actions = ()) -> Step:
    """Wait for live workers, or clear up after the last one."""
    if stopping.live:
        return replace(agent, phase=stopping), actions
    known = stopping.failures, stopping.ends, stopping.answered
    return clear_up(agent, Clearing(stopping.table, stopping.due_s, stopping.then, *known), actions)


def clear_up(agent: Agent, clearing: Clearing, actions: Actions = ()) -> Step:
    return replace(agent, phase=clearing), (*actions, Clear(clearing.table.generation, clearing.is_done))


def with_subscription(status: WorkerStatus, event: events.WorkerListens) -> WorkerStatus:
    """The status with the worker's new subscription to notices."""
    rank = frozenset({event.local_rank})
    return replace(
        status,
        listening=status.listening | rank,
        to_stop=status.to_stop | rank if event.to_stop else status.to_stop - rank,
        to_failure=status.to_failure | rank if event.to_failure else status.to_failure - rank,
        saving=status.saving if event.to_failure else status.saving - rank,
    )


def ranks(local_ranks: frozenset[int]) -> str:
    """As text: `0, 2, 5`."""
    return ", ".join(str(rank) for rank in sorted(local_ranks))


def signal_line(agent: Agent, event: events.Signalled, what: str, left_s: float) -> tuple[Log, ...]:
    """The line for a signal; none after SIGPIPE (`| head`), since no process reads it."""
    if event.signum == SIGPIPE:
        return ()
    part = "leaving the job, " if agent.spec.nodes_max > 1 and event.signum != SIGINT else ""
    how_to_kill = f"; Ctrl-C {'' if event.is_order else 'again '}kills now" if event.signum == SIGINT else ""
    return (Log(f"{event.name}: {part}{what}, SIGKILL in {left_s:g} s{how_to_kill}"),)


def _notify(agent: Agent, stopping: Stopping, message: NotifyWorkers, ended: frozenset[int], actions: Actions) -> Step:
    if stopping.live and message.local_ranks:
        actions = (*actions, message)
    if stopping.live and ended:
        actions = (*actions, SignalWorkers(message.generation, ended, stopping.signum))
    return continue_stop(agent, stopping, actions)


# SIGKILL cannot be ignored: if a worker is still listed then, its fork server has not reported the exit.
KILL_WAIT_S = 5.0
# A worker that has stopped at a step boundary exits with one of these: no failure.
STOPPED_CODES = (0, events.SHELL_BASE + SIGTERM, events.SHELL_BASE + SIGINT)


def snapshot_changed(agent: Agent, stopping: Stopping, _: events.SnapshotChanged, now_s: float) -> Step:
    """Hurry if a newer generation was opened for a failure or a loss: no step will end any more."""
    generation = agent.snapshot.generation
    if generation is None or generation.number <= stopping.table.generation:
        return agent, ()
    if not generation.kind.is_urgent or stopping.mode is Mode.KILLING:
        return agent, ()
    if stopping.then is None:
        stopping = stopping.hurried(now_s, grace_of_failure(agent, stopping))
    if stopping.mode is Mode.BROKEN:
        return replace(agent, phase=stopping), ()
    return stop_broken(agent, stopping)


def store_lost(agent: Agent, phase: Stopping | Clearing, event: events.StoreLost, _: float) -> Step:
    """Exit after the stop, as the store is gone for good."""
    outcome = phase.then or agent.outcome(OutcomeKind.UNKNOWN, event.why)
    return replace(agent, phase=replace(phase, then=outcome)), ()


def worker_exited(agent: Agent, stopping: Stopping, event: events.WorkerExited, now_s: float) -> Step:
    """Record an exit: did the stop cause it, or a failure of its own? After the last one, clear up."""
    if event.local_rank not in stopping.live:
        return agent, ()
    failure = event.failure
    if event.local_rank in stopping.signalled - stopping.status.returned:
        stopping = replace(stopping, answered=stopping.answered | {event.local_rank})
    stopping = replace(stopping, live=stopping.live - {event.local_rank})
    if stopping.then and not stopping.live:
        stopping = replace(stopping, due_s=min(stopping.due_s, now_s + OUTPUT_WAIT_S))
    if event.end and event.local_rank in stopping.status.returned - stopping.status.stopped:
        # It was exiting when a peer noticed that it had gone.
        stopping = replace(stopping, ends=(*stopping.ends, event.end))
    if not failure or _caused_by_stop(event, failure, stopping):
        return continue_stop(agent, stopping)
    return _note_failure(agent, stopping, failure, now_s)


def _note_failure(agent: Agent, stopping: Stopping, failure: Failure, now_s: float) -> Step:
    """Note a failure of a worker's own; report it to the other nodes if it may be the first."""
    if stopping.failures:
        # Two workers killed at the same time, or by one OOM kill, are two failures.
        logged = (Log(failure.sentence, "error"),) if failure.code and failure.code < 0 else ()
        return continue_stop(agent, replace(stopping, failures=(*stopping.failures, failure)), logged)
    is_awaited = stopping.mode is Mode.BOUNDARY and failure.local_rank not in stopping.status.stopped
    if stopping.then and is_awaited:
        # Those that are to stop after a step would wait for this one.
        return stop_broken(agent, stopping)
    generation = agent.snapshot.generation
    # For a bare exit code it is unknown whether a peer's exit is the cause, unless the program ended before its stop.
    is_unknown = failure.kind is FailureKind.EXIT_CODE and failure.local_rank not in stopping.status.returned
    if stopping.then or generation is None or failure.kind.is_secondary or is_unknown:
        return continue_stop(agent, stopping)
    stopping = replace(stopping, failures=(failure,))
    failed = Commit(transactions.fail(agent.snapshot, agent.me, failure))
    actions: Actions = (failed, Log(failure.sentence, "error"))
    if stopping.mode is Mode.KILLING or generation.kind.is_urgent:
        # The others got SIGKILL; or another node reported first, and its failure may be an effect of this exit.
        return continue_stop(agent, stopping, actions)
    # It was to stop for a join or a leave; now its peers would wait for it, so they are stopped as after a failure.
    return stop_broken(agent, stopping.hurried(now_s, grace_of_failure(agent, stopping)), actions)


def worker_listens(agent: Agent, stopping: Stopping, event: events.WorkerListens, _: float) -> Step:
    """Note the worker's subscription; if it drops a notice that was sent, it gets the signal after all."""
    status = with_subscription(stopping.status, event)
    now = (stopping.live & {event.local_rank}) - status.stopped - stopping.signalled
    match stopping.mode:
        case Mode.BOUNDARY:
            now -= status.to_stop
        case Mode.BROKEN:
            now -= status.to_failure | status.returned | stopping.spent
        case Mode.KILLING:
            now = frozenset()
    agent = replace(agent, phase=replace(stopping, status=status, signalled=stopping.signalled | now))
    return agent, (SignalWorkers(event.generation, now, stopping.signum),) if now else ()


def worker_saving(agent: Agent, phase: Running | Stopping, event: events.WorkerSaving, _: float) -> Step:
    """Give it the full stop grace, even in a broken group: the next generation resumes from its save.

    It may notice a peer's failure before this agent does.
    """
    status = replace(phase.status, saving=phase.status.saving | {event.local_rank})
    return replace(agent, phase=replace(phase, status=status)), ()


def worker_saved(agent: Agent, stopping: Stopping, event: events.WorkerSaved, _: float) -> Step:
    """Kill it if the group is broken: it is not needed any more."""
    notified = (stopping.live & stopping.status.to_failure) - stopping.status.stopped - stopping.spent
    if stopping.mode is not Mode.BROKEN or event.local_rank not in notified:
        return agent, ()
    spent = frozenset({event.local_rank})
    agent = replace(agent, phase=replace(stopping, spent=stopping.spent | spent))
    return agent, (SignalWorkers(event.generation, spent, SIGKILL),)


def worker_stopped(agent: Agent, stopping: Stopping, event: events.WorkerStopped, now_s: float) -> Step:
    """Note that it has reached the step boundary; after the last one the time to save begins."""
    status = stopping.status
    stopping = replace(stopping, status=replace(status, stopped=status.stopped | {event.local_rank}))
    if stopping.until_s is not None and not stopping.on_the_way:
        # From here on they only save.
        stopping = replace(stopping, until_s=None).hurried(now_s, agent.times.stop_grace_s)
    return replace(agent, phase=stopping), ()


def group_failed(agent: Agent, stopping: Stopping, event: events.GroupFailed, _: float) -> Step:
    """Clear up, if the workers died too; one that hangs gets SIGKILL at the stop's deadline."""
    return continue_stop(agent, replace(stopping, live=frozenset())) if event.workers_too else (agent, ())


def signalled(agent: Agent, stopping: Stopping, event: events.Signalled, now_s: float) -> Step:
    """Leave the job, or end it for all nodes (SIGINT), after the stop; a second SIGINT kills the workers now."""
    if event.signum == SIGINT and agent.is_interrupted:
        logged = Log("SIGINT again: killing the workers now")
        return (agent, ()) if stopping.mode is Mode.KILLING else _kill(agent, stopping, now_s, logged)
    if stopping.then is None:
        return _leave_after(agent, stopping, event, now_s)
    return _end_too(agent, stopping, event, now_s) if event.signum == SIGINT else (agent, ())


def tick(agent: Agent, stopping: Stopping, _: events.Tick, now_s: float) -> Step:
    """Act at a deadline: the step boundary's, the grace's; SIGKILL, then another fork server."""
    grace_s = agent.times.stop_grace_s
    if stopping.until_s is not None and now_s >= stopping.until_s:
        late = stopping.on_the_way
        stopping = replace(stopping, signalled=stopping.signalled | late, until_s=None)
        stopping = replace(stopping, due_s=now_s + grace_s, grace_s=grace_s)
        text = f"reached no step boundary within {agent.times.boundary_wait_s:g} s; SIGTERM"
        return _signal_late(agent, stopping, late, text, SIGTERM)
    if now_s < stopping.due_s:
        return agent, ()
    if stopping.mode is Mode.KILLING:
        text = f"local rank {ranks(stopping.live)} did not exit within {KILL_WAIT_S:g} s of SIGKILL"
        agent = replace(agent, phase=replace(stopping, due_s=now_s + KILL_WAIT_S))
        replaced = ReplaceForkServer(stopping.table.generation)
        return agent, (Log(f"{text}; replacing the fork server", "warning"), replaced)
    late, text = stopping.live, f"still ran after {stopping.grace_s:g} s; SIGKILL"
    if stopping.saving:
        until_s = stopping.due_s - stopping.grace_s + grace_s
        if now_s < until_s:
            # All but those that are saving are killed.
            late -= stopping.saving | stopping.spent
            stopping = replace(stopping, spent=stopping.spent | late, due_s=until_s, grace_s=grace_s)
            return _signal_late(agent, stopping, late, text, SIGKILL)
        late, text = stopping.saving, f"had not finished saving {stopping.grace_s:g} s after the failure; SIGKILL"
    return _kill(agent, stopping, now_s, Log(f"local rank {ranks(late)} {text}", "warning"))


def _signal_late(agent: Agent, stopping: Stopping, late: frozenset[int], text: str, signum: int) -> Step:
    agent = replace(agent, phase=stopping)
    if not late:
        return agent, ()
    logged = Log(f"local rank {ranks(late)} {text}", "warning")
    return agent, (logged, SignalWorkers(stopping.table.generation, late, signum))


def _leave_after(agent: Agent, stopping: Stopping, event: events.Signalled, now_s: float) -> Step:
    """The stop of a generation becomes that of this node, or of the job."""
    agent, withdrawn, outcome = withdraw(agent, event)
    stopping = replace(stopping, then=outcome)
    if stopping.mode is Mode.KILLING:
        return replace(agent, phase=stopping), withdrawn
    reason = StopReason.INTERRUPT if event.signum == SIGINT else StopReason.LEAVE
    stopping = stopping.hurried(now_s, agent.times.stop_grace_s)
    logged = signal_line(agent, event, "stopping already", _left_s(stopping, now_s))
    live, status, reached, signum = stopping.live, stopping.status, stopping.signalled, event.to_workers
    # In a broken group there is no step to end, and those that are saving are left alone.
    is_broken = stopping.mode is Mode.BROKEN
    notified = frozenset[int]() if is_broken else (live & status.to_stop) - reached
    ended = live - notified - (status.to_failure if is_broken else frozenset())
    if signum == stopping.signum and signum in agent.notices:
        # It was forwarded before: another node received it first.
        ended -= reached
    stopping = replace(stopping, signalled=reached | ended, signum=signum, notice=0, until_s=None)
    message = NotifyWorkers(stopping.table.generation, notified, StopAtStepBoundary(reason))
    return _notify(agent, stopping, message, ended, (*withdrawn, *logged))


def _end_too(agent: Agent, stopping: Stopping, event: events.Signalled, now_s: float) -> Step:
    """SIGINT while this node is leaving: end the whole job, unless it has ended already."""
    agent, withdrawn = end_of_own_run(agent, stopping.table.generation, event)
    if stopping.mode is Mode.KILLING:
        return agent, withdrawn
    ends = "the whole job ends; " if withdrawn and agent.spec.nodes_max > 1 else ""
    return agent, (*withdrawn, *signal_line(agent, event, f"{ends}stopping already", _left_s(stopping, now_s)))


def _left_s(stopping: Stopping, now_s: float) -> int:
    return max(0, math.ceil(stopping.due_s - now_s))


def _kill(agent: Agent, stopping: Stopping, now_s: float, logged: Log) -> Step:
    due_s = now_s + KILL_WAIT_S
    stopping = replace(stopping, mode=Mode.KILLING, signalled=frozenset(), until_s=None, due_s=due_s)
    return replace(agent, phase=stopping), (logged, SignalWorkers(stopping.table.generation, stopping.live, SIGKILL))


def _caused_by_stop(event: events.WorkerExited, failure: Failure, stopping: Stopping) -> bool:
    """Whether the stop caused a worker's exit.

    A program that raised an exception was exiting before the signal.
    """
    if failure.kind not in (FailureKind.SIGNAL, FailureKind.EXIT_CODE):
        return False
    is_killed = stopping.mode is Mode.KILLING or event.local_rank in stopping.spent
    has_stopped = event.local_rank in stopping.status.stopped and event.code in STOPPED_CODES
    # Another node's notice, or SIGTERM.
    signum = stopping.notice or SIGTERM
    is_signalled = event.code in (-SIGTERM, events.SHELL_BASE + SIGTERM, -signum, events.SHELL_BASE + signum)
    return has_stopped or is_signalled or (event.code == -SIGKILL and is_killed)


# Phases CLEARING and FINISHED: no worker runs; the output is collected, and the failure is explained.


def _report_ends(agent: Agent, generation: int, ends: tuple[Failure, ...]) -> Actions:
    """If another rank's failure ended the generation, record which worker of this node had exited before.

    The record decides only if all others have lost a peer: then this worker is the peer that they lost.
    """
    newest = agent.snapshot.generation
    if not ends or newest is None or newest.kind is not OpenKind.FAIL or newest.number != generation + 1:
        return ()
    return (Commit(transactions.complete(agent.snapshot, agent.me, ends[0])),)


def clearing_signalled(agent: Agent, clearing: Clearing, event: events.Signalled, now_s: float) -> Step:
    """Leave the job, or end it for all nodes (SIGINT), when all is cleared, or soon; a second SIGINT exits now.

    Where all workers exited with 0, that is reported first.
    """
    if event.signum == SIGINT and agent.is_interrupted:
        # Only output is left, and its reader does not read it.
        return exit_with(agent, clearing.then) if clearing.then else (agent, ())
    newest = agent.snapshot.generation
    match clearing:
        case Clearing(then=None, is_done=True) if newest and newest.number == clearing.table.generation:
            agent, actions = _finish_or_join(agent, clearing)
            if agent.spec.nodes_max == 1:
                # Its job has succeeded then.
                return agent, actions
            agent, left = leave(agent, clearing, event, now_s)
            return agent, (*actions, *left)
        case Clearing(then=None):
            agent, withdrawn, outcome = withdraw(agent, event)
            return replace(agent, phase=replace(clearing, then=outcome, until_s=now_s + OUTPUT_WAIT_S)), withdrawn
        case Clearing(then=Outcome() as then) if event.signum == SIGINT:
            agent, withdrawn = end_of_own_run(agent, clearing.table.generation, event)
            return exit_with(agent, then, withdrawn)
    return agent, ()


def clearing_tick(agent: Agent, clearing: Clearing, _: events.Tick, now_s: float) -> Step:
    """Stop waiting for output if the agent is to exit."""
    if clearing.then is None or now_s < clearing.until_s:
        return agent, ()
    # Only output is left, and its reader does not read it.
    return exit_with(agent, clearing.then)


def cleared(agent: Agent, clearing: Clearing, event: events.Cleared, now_s: float) -> Step:
    """Complete the record of the failure; then exit, be finished, or join the newest generation."""
    agent = replace(agent, progressed=event.progressed)
    agent, actions, then = _complete(agent, clearing, event)
    agent, more = exit_with(agent, then) if then else _finish_or_join(agent, clearing)
    return note_idle(agent, now_s), (*actions, *more)


def _finish_or_join(agent: Agent, clearing: Clearing) -> Step:
    """Enter FINISHED, or join again."""
    newest, number = agent.snapshot.generation, clearing.table.generation
    if clearing.is_done and newest and newest.number == number:
        done = Commit(transactions.report_done(agent.snapshot, agent.me, number))
        finished = Finished(clearing.table, clearing.ends, agent.snapshot.generation_revision)
        return replace(agent, phase=finished), (done,)
    return join_again(agent, number), ()


def _complete(agent: Agent, clearing: Clearing, event: events.Cleared) -> tuple[Agent, Actions, Outcome | None]:
    """Complete the failure's record: the output, which is here now, may show that an exit only reported a lost peer."""
    then, failures = clearing.then, clearing.failures

    def whole_of(failure: Failure) -> Failure:
        return with_tail(failure, event.tails.get(failure.local_rank, ""))

    def with_cause(failure: Failure) -> Failure:
        return explained(failure, replace(event.facts, mismatch=clearing.table.mismatch))

    if not failures:
        # The outcome of a node that withdraws alone.
        if then and then.failure and then.failure.node_id == agent.me.node_id:
            then = replace(then, failure=with_cause(whole_of(then.failure)))
        return agent, _report_ends(agent, clearing.table.generation, clearing.ends), then
    first = failures[0]
    # The others lost a peer, or failed later: no report includes their causes.
    known = [*map(whole_of, failures), *map(whole_of, clearing.ends)]
    # Our signal may have caused a bare exit code, but not an exception that the output shows.
    known = [f for f in known if f.kind is not FailureKind.EXIT_CODE or f.local_rank not in clearing.answered] or known
    cause = killed_together(with_cause(decisive_failure(known, agent.spec.no_restart_codes)), known)
    cause = replace(cause, ranks_alike=len({each.rank for each in known if is_one_bug(cause, each)}) or 1)
    actions: Actions = (Commit(transactions.complete(agent.snapshot, agent.me, cause)),)
    if cause.local_rank != first.local_rank:
        # A worker that dies while it writes to a disk exits later than its peers notice and give up.
        actions = (*actions, Log(f"the cause: {cause.sentence}", "error"))
    agent = replace(agent, last_failure=cause)
    return agent, actions, replace(then, failure=cause) if then and then.failure == first else then


def finished_snapshot_changed(agent: Agent, finished: Finished, _event: events.SnapshotChanged, _now_s: float) -> Step:
    """Join again where a newer generation was opened; exit if the job has ended."""
    snapshot, generation = agent.snapshot, agent.snapshot.generation
    if outcome := outcome_in_store(agent):
        return exit_with(agent, outcome)
    if generation is None:
        return agent, ()
    if generation.number <= finished.table.generation:
        if snapshot.generation_revision == finished.reported:
            return agent, ()
        # The key was overwritten and restored: the guard of the report may not have held.
        done = Commit(transactions.report_done(snapshot, agent.me, finished.table.generation))
        return replace(agent, phase=replace(finished, reported=snapshot.generation_revision)), (done,)
    records = _report_ends(agent, finished.table.generation, finished.ends)
    return join_again(agent, finished.table.generation), (*records, Log(f"running again: {generation.cause}"))
