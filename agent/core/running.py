"""Phase RUNNING: the exits and hangs of this node's workers, and what stops them."""

from __future__ import annotations

import math
from dataclasses import replace
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

from elaunch.agent.core import events
from elaunch.agent.core.actions import (
    Action,
    Actions,
    Blame,
    Commit,
    KeepStacks,
    Log,
    NameThreads,
    NotifyWorkers,
    ShowStacks,
    SignalWorkers,
    StopReason,
    TakeStacks,
)
from elaunch.agent.core.membership import loss_of_keys, withdraw, withdrawal
from elaunch.agent.core.state import EXIT_S, Agent, Clearing, HeldEnd, ProgramEnd, Running, Step, Stopping
from elaunch.agent.core.stopping import (
    STOPPED_CODES,
    clear_up,
    grace_of_failure,
    ranks,
    signal_line,
    stop_at_boundary,
    stop_broken,
    with_subscription,
)
from elaunch.agent.core.store_outage import given_up
from elaunch.agent.diagnosis import hang
from elaunch.agent.diagnosis.stack_groups import full_text, group_text, grouped
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.hang_verdict import Hang, confirm_s, hang_sentence, report_idle
from elaunch.rendezvous.rules.restart_policy import decisive_failure
from elaunch.rendezvous.types import Failure, FailureKind, Generation, OpenKind, Outcome, OutcomeKind, host_of

# Schedulers signal the agent and its workers together: a worker killed that way is no failure if we get it too.
HOLD_S = 0.1
# Signals that are sent to request an exit.
REQUESTS = (SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM)
# How long the exit of a lost peer is awaited: its program may still clean up.
UNEXPLAINED_S = 1.0
# The kinds of exit that a lost peer may have caused, as far as is known before the rank's output is read.
EFFECTS = (FailureKind.PEER_LOST, FailureKind.EXIT_CODE)
# All ranks of a job stop after the same step, even those whose agent receives the reason this much later.
STOPPED_HOLD_S = 2.0
# The verdict on a hang comes first, and names a rank that others wait for: it is not logged twice.
AFTER_HANG_S = 10.0


def snapshot_changed(agent: Agent, running: Running, _event: events.SnapshotChanged, now_s: float) -> Step:
    """Stop the workers if a newer generation was opened or the job has ended."""
    generation, ended, lost = agent.snapshot.generation, agent.snapshot.ended, loss_of_keys(agent)
    if lost:
        return _end_with_store(agent, running, lost, now_s)
    assert generation
    verdict: Actions = ()
    if agent.snapshot.hang or running.hang_state.logged:
        running, verdict = _follow_verdict(agent, running)
        agent = replace(agent, phase=running)
    actions: Actions = ()
    if ended:
        is_interrupt = ended.kind is OutcomeKind.INTERRUPTED
        reason = StopReason.INTERRUPT if is_interrupt else StopReason.LEAVE
        logged = Log(f"stopping: the job has ended: {ended.reason}")
        grace_s = agent.times.stop_grace_s if is_interrupt else grace_of_failure(agent, running)
        stopping = Stopping.of(running, now_s, grace_s, ended)
        agent, actions = stop_at_boundary(agent, stopping, reason, _signal_for(agent, running), (logged,))
    elif generation.number > running.table.generation:
        agent, actions = _yield_to(agent, running, generation, now_s)
    return agent, (*verdict, *actions)


def store_lost(agent: Agent, running: Running, event: events.StoreLost, now_s: float) -> Step:
    """Stop the workers with time to save, then exit."""
    return _end_with_store(agent, running, agent.outcome(OutcomeKind.UNKNOWN, event.why), now_s)


def worker_exited(agent: Agent, running: Running, event: events.WorkerExited, now_s: float) -> Step:
    """After a failure stop the others and open the next generation; after the last exit with 0 clear up."""
    rest, failure, held = replace(running, live=running.live - {event.local_rank}), event.failure, running.held
    has_stopped = event.local_rank in running.status.stopped
    if event.end and failure is None and not has_stopped:
        rest = replace(rest, ends=(*rest.ends, event.end))
    if has_stopped and event.code in STOPPED_CODES:
        if failure or not rest.live:
            rest = replace(rest, held=held or HeldEnd(failure, now_s + STOPPED_HOLD_S, is_stop=True))
        return replace(agent, phase=rest), ()
    effects = held.effects if held else ()
    if failure is None:
        if held and effects and not rest.on_way_out(now_s):
            return _fail(agent, rest, held.failure or effects[0], now_s)
        if rest.live or held:
            return replace(agent, phase=rest), ()
        return clear_up(agent, _done(rest, now_s))
    if -event.code in REQUESTS and not (held and held.is_stop):
        if held is None or effects:
            until_s = max(now_s + HOLD_S, held.until_s if held else 0.0)
            held = HeldEnd(failure, until_s, effects=effects)
        return replace(agent, phase=replace(rest, held=held)), ()
    if awaited_s := _awaits_exit(running, rest, failure, now_s):
        awaiting = held or HeldEnd(failure, awaited_s)
        return replace(agent, phase=replace(rest, held=replace(awaiting, effects=(*effects, failure)))), ()
    return _fail(agent, rest, _cause(running, failure), now_s)


def worker_ended(agent: Agent, running: Running, event: events.WorkerEnded, now_s: float) -> Step:
    """Give the worker time to exit: peers may notice the end before the process has exited, which a thread delays."""
    times, held = agent.times, running.held
    lingers_s = times.hang_after_s + AFTER_HANG_S if times.hang_after_s else math.inf
    limit_s = now_s + (times.stop_grace_s if event.raised else lingers_s)
    end = ProgramEnd(event.local_rank, event.over_s, now_s, event.raised, limit_s)
    if held and held.effects and not event.raised:
        held = replace(held, until_s=max(held.until_s, now_s + EXIT_S))
    status = replace(running.status, ended=(*running.status.ended, end))
    return replace(agent, phase=replace(running, status=status, held=held)), ()


def worker_listens(agent: Agent, running: Running, event: events.WorkerListens, _now_s: float) -> Step:
    """Note which notices the worker takes on its link."""
    return replace(agent, phase=replace(running, status=with_subscription(running.status, event))), ()


def worker_stopped(agent: Agent, running: Running, event: events.WorkerStopped, _now_s: float) -> Step:
    """Note that the worker has reached the step boundary: the reason for the stop may reach its agent later."""
    status = replace(running.status, stopped=running.status.stopped | {event.local_rank})
    return replace(agent, phase=replace(running, status=status)), ()


def group_failed(agent: Agent, running: Running, event: events.GroupFailed, now_s: float) -> Step:
    """Count a hang or a lost service as a failure: stop the workers, if they did not exit with the service."""
    rest = replace(running, live=frozenset()) if event.workers_too else running
    return _fail(agent, rest, _cause(running, event.failure), now_s)


def signalled(agent: Agent, running: Running, event: events.Signalled, now_s: float) -> Step:
    """Notify the other nodes, pass the signal on to the workers, and exit after the stop."""
    agent, withdrawn, outcome = withdraw(agent, event)
    workers = "1 worker" if len(running.live) == 1 else f"{len(running.live)} workers"
    logged = signal_line(agent, event, f"stopping {workers}", agent.times.stop_grace_s)
    reason = StopReason.INTERRUPT if event.signum == SIGINT else StopReason.LEAVE
    stopping = Stopping.of(running, now_s, agent.times.stop_grace_s, outcome)
    return stop_at_boundary(agent, stopping, reason, event.to_workers, (*withdrawn, *logged))


def tick(agent: Agent, running: Running, _event: events.Tick, now_s: float) -> Step:
    """Judge a held exit; kill workers that raised and did not exit; give up on a head that is lost."""
    if lost := given_up(agent, now_s):
        stopping = Stopping.of(running, now_s, agent.times.stop_grace_s, lost)
        text = "stopping: the head, which serves the job's store, and its ranks are lost"
        return stop_broken(agent, stopping, (Log(text, "error"),))
    held = running.held
    if held is None or now_s < held.until_s:
        return _past_limits(agent, running, now_s)
    return _fail(agent, running, held.failure, now_s) if held.failure else clear_up(agent, _done(running, now_s))


def due_s(running: Running) -> float | None:
    """When a held exit is due, or the time limit of a worker whose program has ended."""
    limits_s = [end.limit_s for end in running.status.ended if end.local_rank in running.live]
    held_s = [running.held.until_s] if running.held else []
    return min((at_s for at_s in (*held_s, *limits_s) if at_s < math.inf), default=None)


def _past_limits(agent: Agent, running: Running, now_s: float) -> Step:
    """Kill workers that raised an exception and did not exit; log those that linger after their programs' end."""
    times, known = agent.times, running.status.ended
    late = frozenset(e.local_rank for e in known if now_s >= e.limit_s) & running.live
    if not late:
        return agent, ()
    ended = tuple(replace(e, limit_s=math.inf) if e.local_rank in late else e for e in known)
    agent = replace(agent, phase=replace(running, status=replace(running.status, ended=ended)))
    actions: Actions = ()
    if lingering := late & running.status.returned:
        text = (
            f"the program of local rank {ranks(lingering)} ended {times.hang_after_s + AFTER_HANG_S:.0f} s ago, but its"
            f" process has not exited: elaunch stacks {agent.called} shows what keeps it alive, elaunch stop"
            f" {agent.called} ends the job"
        )
        actions = (Log(text, "warning"), NameThreads(lingering))
    # Seen with torch: the last reference to a process group waits for a thread that waits for the GIL.
    if killed := late - lingering:
        text = f"local rank {ranks(killed)} raised an exception and did not exit within {times.stop_grace_s:g} s"
        signal = SignalWorkers(running.table.generation, killed, SIGKILL)
        actions = (*actions, Log(f"{text}; SIGKILL", "warning"), signal)
    return agent, actions


def _done(running: Running, now_s: float) -> Clearing:
    return Clearing(running.table, now_s, ends=running.ends, is_done=True)


def _end_with_store(agent: Agent, running: Running, outcome: Outcome, now_s: float) -> Step:
    stopping = Stopping.of(running, now_s, agent.times.stop_grace_s, outcome)
    return stop_at_boundary(agent, stopping, StopReason.LEAVE, SIGTERM, (Log(f"stopping: {outcome.reason}", "error"),))


def _yield_to(agent: Agent, running: Running, generation: Generation, now_s: float) -> Step:
    """Stop this node's workers for a newer generation: immediately where the group is broken, else after a step."""
    times, is_join = agent.times, generation.kind is OpenKind.JOIN
    logged = (Log(f"stopping: {generation.cause}", "info" if is_join else "warning"),)
    if generation.kind.is_urgent:
        # The exit status of a rank of this node may be the cause.
        return stop_broken(agent, Stopping.of(running, now_s, _grace_s(agent, running, now_s)), logged)
    if running.held and running.held.failure and running.held.effects:
        # No step completes any more, and a node that joins waits for these workers.
        return _fail(agent, running, running.held.failure, now_s)
    reason = StopReason.JOIN if is_join else StopReason.LEAVE
    is_awaited = bool((running.live & running.status.to_stop) - running.status.stopped)
    wait_s = times.boundary_wait_s if is_awaited else 0.0
    stopping = Stopping.of(running, now_s, wait_s + times.stop_grace_s)
    return stop_at_boundary(agent, stopping, reason, _signal_for(agent, running), logged, until_s=now_s + wait_s)


def _grace_s(agent: Agent, running: Running, now_s: float) -> float:
    """A failure's grace, and at least the time in which a rank on its way out exits without a signal."""
    exit_s = EXIT_S if running.live & running.status.exiting(now_s) else 0.0
    return max(grace_of_failure(agent, running), exit_s)


def _signal_for(agent: Agent, running: Running) -> int:
    """The signal for workers that do not listen: SIGTERM, or a scheduler's notice by which another node leaves.

    Where the program has a handler for the notice, SIGTERM would kill it before it saves.
    """
    generation = agent.snapshot.generation
    is_notice = generation and generation.number > running.table.generation and generation.signum in agent.notices
    return generation.signum if generation and is_notice else SIGTERM


def _cause(running: Running, failure: Failure) -> Failure:
    """The first cause: a held failure, else this one.

    A held stop at a step boundary is no failure, and a lost peer has a cause, which is this one.
    """
    held = running.held
    is_cause = held and held.failure not in (None, *held.effects) and not held.is_stop
    return held.failure if held and held.failure and is_cause else failure


def _awaits_exit(running: Running, rest: Running, failure: Failure, now_s: float) -> float | None:
    """How long to wait for another rank's exit that may explain `failure`, as a deadline; None without a wait."""
    # NCCL's watchdog ends a survivor by SIGABRT; only its output, which is read later, shows why.
    is_effect = failure.kind in EFFECTS or failure.code == -SIGABRT
    if not is_effect or (rest.held and not rest.held.effects):
        return None
    # A program that catches the error of a lost peer may exit with a code. It ended after that peer's.
    over, rank = running.status.over, failure.local_rank
    before = over[: over.index(rank)] if rank in over else over
    if rest.on_way_out(now_s) & {*before}:
        return now_s + EXIT_S
    is_unexplained = failure.kind is FailureKind.PEER_LOST and rest.live and not running.ends
    # On several nodes the cause is probably on another one, whose agent waits for this report.
    return now_s + UNEXPLAINED_S if is_unexplained and len(running.table.seats) == 1 else None


def _fail(agent: Agent, running: Running, failure: Failure, now_s: float) -> Step:
    """Open the next generation together with the failure that is its cause, then stop the workers that still run."""
    live = running.live
    is_newcomer = running.is_first and running.table.progressed
    if failure.kind is FailureKind.STARTUP and is_newcomer and failure.code not in agent.spec.no_restart_codes:
        return _withdraw_newcomer(agent, running, failure, now_s)
    failures = _in_order(running, failure)
    failure = decisive_failure((*failures, *running.ends), agent.spec.no_restart_codes)
    failures = (failure, *(each for each in failures if each.local_rank != failure.local_rank))
    which = "worker" if failure.local_rank in live else "other"
    stopped = f"; stopping {len(live)} {which}{'s' if len(live) > 1 else ''}" if live else ""
    failed = Commit(transactions.fail(agent.snapshot, agent.me, failure))
    logged = Log(failure.headline + stopped, "error")
    stopping = replace(Stopping.of(running, now_s, _grace_s(agent, running, now_s)), failures=failures)
    return stop_broken(agent, stopping, (failed, logged))


def _in_order(running: Running, failure: Failure) -> tuple[Failure, ...]:
    """`failure` and those that another rank may have caused, in the order in which their programs ended."""
    effects, over = running.held.effects if running.held else (), running.status.over
    known = failure, *(each for each in effects if each.local_rank != failure.local_rank)
    return tuple(sorted(known, key=lambda each: [*over, each.local_rank].index(each.local_rank)))


def _withdraw_newcomer(agent: Agent, running: Running, failure: Failure, now_s: float) -> Step:
    """Leave the job if a newly joined node cannot start its workers: the cause is on this node."""
    reason = "it never got past its start on this node, while the job ran on others; they continue without it"
    outcome = agent.outcome(OutcomeKind.FAILED, reason, failure=failure)
    withdrawn = withdrawal(agent, opens=True, why="its workers could not start")
    stopping = Stopping.of(running, now_s, agent.times.stop_grace_s, outcome)
    agent, actions = stop_broken(agent, stopping, (Log(failure.sentence, "error"), *withdrawn))
    return agent.as_member(is_member=False), actions


# Groups of equal stacks that the console shows; the others are in the file.
_GROUPS_SHOWN = 8


def sampled(agent: Agent, running: Running, event: events.Sampled, _now_s: float) -> Step:
    """Count how long all workers have been idle, take their stacks at intervals, and report a change to the leader."""
    state, live = running.hang_state, _awaited(running)
    # An exit that is not explained yet is no hang.
    if not agent.times.hang_after_s or running.held or running.leaving:
        return agent, ()
    state = hang.after_windows(state, live, event.windows)
    actions: Actions = ()
    if hang.stacks_are_due(state, agent.times.hang_after_s - confirm_s(agent.times, running.table)):
        state = replace(state, is_sampling=True)
        actions = (TakeStacks(running.table.generation, live),)
    return _report(agent, replace(running, hang_state=state), actions)


def stacks_taken(agent: Agent, running: Running, event: events.StacksTaken, _now_s: float) -> Step:
    """Compare the stacks with those taken before, and report a change to the leader."""
    seat = running.seat_of(agent.me.node_id)
    state = hang.after_stacks(running.hang_state, event.stacks, seat.first_rank)
    return _report(agent, replace(running, hang_state=state), ())


def _follow_verdict(agent: Agent, running: Running) -> tuple[Running, Actions]:
    """Log the leader's verdict once, with the stacks of this node's ranks, and that the job is no longer idle."""
    state, hang, generation = running.hang_state, agent.snapshot.hang, running.table.generation
    if hang is not None and hang.generation == generation:
        if hang.message == state.logged:
            return running, ()
        logged = replace(running, hang_state=replace(state, logged=hang.message))
        return logged, _verdict(agent, running, hang)
    is_still_here = agent.snapshot.generation is not None and agent.snapshot.generation.number == generation
    # The end of the job clears the verdict too.
    if not state.logged or not is_still_here or agent.snapshot.ended:
        return running, ()
    resumed = replace(running, hang_state=replace(state, logged=""))
    return resumed, (Log("the job is no longer idle: a rank has made progress, or has exited"),)


def _awaited(running: Running) -> frozenset[int]:
    """The workers that others may wait for: a process whose program has ended enters no more collectives."""
    return running.live - running.status.returned


def _report(agent: Agent, running: Running, actions: Actions) -> Step:
    seat, state = running.seat_of(agent.me.node_id), running.hang_state
    limit_s = agent.times.hang_after_s, confirm_s(agent.times, running.table)
    record = hang.record_of(state, seat, running.live, _awaited(running), *limit_s)
    if hang.has_changed(state.recorded, record):
        txn = report_idle(agent.snapshot, agent.me, running.table.generation, record)
        running = replace(running, hang_state=replace(state, recorded=record))
        actions = (*actions, Commit(txn))
    return replace(agent, phase=running), actions


def _verdict(agent: Agent, running: Running, hang: Hang) -> Actions:
    generation, state, seat = running.table.generation, running.hang_state, running.seat_of(agent.me.node_id)
    lines = [f"  {group_text(group)}" for group in grouped(state.stacks)[:_GROUPS_SHOWN]]
    is_failure = agent.restarts_hung and not hang.is_unawaited
    if not is_failure:
        lines += _hints(agent, running, hang)
    host = next((each.host for each in running.table.seats if each.node_id == hang.node_id), host_of(hang.node_id))
    headline = f"the job seems to hang: {hang_sentence(hang, host)}"
    actions: list[Action] = [Log("\n".join([headline, *lines]), "warning")]
    if state.stacks:
        actions.append(KeepStacks(generation, full_text(state.stacks)))
    # Workers can show their stacks themselves, where py-spy could not read all.
    listening = running.live & running.status.listening
    if listening and (not state.stacks or any(stack.trouble for stack in state.stacks)):
        actions.append(NotifyWorkers(generation, listening, ShowStacks()))
    if is_failure and hang.node_id == seat.node_id:
        local_rank = hang.rank - seat.first_rank if hang.rank >= 0 else -1
        actions.append(Blame(generation, local_rank, hang.message, round(state.idle_s), hang.is_blameless))
    return tuple(actions)


def _hints(agent: Agent, running: Running, hang: Hang) -> list[str]:
    """Commands for a person on this host."""
    stopped = [each for each in running.hang_state.stacks if each.is_stopped]
    lines = [f"to let rank {each.rank} continue: kill -CONT {each.pid}" for each in stopped]
    lines.append(f"to see all threads: elaunch stacks {agent.called}; to end the job: elaunch stop {agent.called}")
    if agent.spec.max_restarts:
        always = "" if hang.is_unawaited else ", or start the job with --on-hang restart"
        lines.append(f"to restart the workers: elaunch restart {agent.called}{always}")
    return lines
