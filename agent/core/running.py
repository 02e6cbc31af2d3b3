"""Phase RUNNING: this node's workers run."""

from __future__ import annotations

import math
from dataclasses import replace
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

from elaunch.agent.core import events
from elaunch.agent.core.actions import Action, Commit, Log, NameThreads, SignalWorkers, StopReason
from elaunch.agent.core.hangs import hear_of_hang
from elaunch.agent.core.leaving import goodbye, interrupted, say_goodbye, take_signal
from elaunch.agent.core.membership import loss_of_keys
from elaunch.agent.core.state import EXIT_S, Agent, Clearing, HeldEnd, ProgramEnd, Running, Step, Stopping
from elaunch.agent.core.stopping import (
    STOPPED_CODES,
    answer_to_signal,
    clear_up,
    grace_of_failure,
    ranks,
    stop_at_boundary,
    stop_broken,
    wishes_of,
)
from elaunch.agent.core.store_outage import given_up, say_waits
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.restart_policy import decisive_failure
from elaunch.rendezvous.types import Failure, FailureKind, Generation, OpenKind, Outcome, OutcomeKind

# Schedulers signal the agent and its workers together; a worker that died so is no failure if our signal comes too.
HOLD_S = 0.1
# Those that somebody sends on purpose.
ASKING = (SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM)
# A lost peer whose end is not known yet: its program may still clean up.
UNEXPLAINED_S = 1.0
# How a rank ends that lost a peer, as far as is known before its output is read.
EFFECTS = (FailureKind.PEER_LOST, FailureKind.EXIT_CODE)
# All ranks of a job stop after the same step, also those whose agent has not yet heard why.
STOPPED_HOLD_S = 2.0
# A rank that others wait for is named by the verdict on the hang, and that once.
AFTER_HANG_S = 10.0


def looked(agent: Agent, running: Running, _event: events.SnapshotChanged, now_s: float) -> Step:
    """Stop the workers if a newer generation was opened or the job has ended."""
    generation, ended, lost = agent.snapshot.generation, agent.snapshot.ended, loss_of_keys(agent)
    if lost:
        return _end_with_store(agent, running, lost, now_s)
    assert generation
    heard: tuple[Action, ...] = ()
    if agent.snapshot.hang or running.hang_state.logged:
        running, heard = hear_of_hang(agent, running)
        agent = replace(agent, phase=running)
    actions: tuple[Action, ...] = ()
    if ended:
        agent, actions = _stop_with_job(agent, running, ended, now_s)
    elif generation.number > running.table.generation:
        agent, actions = _make_way(agent, running, generation, now_s)
    return agent, (*heard, *actions)


def store_lost(agent: Agent, running: Running, event: events.StoreLost, now_s: float) -> Step:
    """Stop the workers with time to save, then exit."""
    return _end_with_store(agent, running, agent.outcome(OutcomeKind.UNKNOWN, event.why), now_s)


def worker_exited(agent: Agent, running: Running, event: events.WorkerExited, now_s: float) -> Step:
    """After a failure stop the others and open the next generation; after the last exit with 0 clear up."""
    rest, failure, held = replace(running, live=running.live - {event.local_rank}), event.failure, running.held
    has_stopped = event.local_rank in running.words.stopped
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
    if -event.code in ASKING and not (held and held.is_stop):
        if held is None or effects:
            until_s = max(now_s + HOLD_S, held.until_s if held else 0.0)
            held = HeldEnd(failure, until_s, effects=effects)
        return replace(agent, phase=replace(rest, held=held)), ()
    if awaited_s := _awaits_exit(running, rest, failure, now_s):
        awaiting = held or HeldEnd(failure, awaited_s)
        return replace(agent, phase=replace(rest, held=replace(awaiting, effects=(*effects, failure)))), ()
    return _fail(agent, rest, _cause(running, failure), now_s)


def worker_ended(agent: Agent, running: Running, event: events.WorkerEnded, now_s: float) -> Step:
    """Give it time to end by itself: its peers may notice that before its process is gone, which a thread may keep."""
    times, held = agent.times, running.held
    lingers_s = times.hang_after_s + AFTER_HANG_S if times.hang_after_s else math.inf
    limit_s = now_s + (times.stop_grace_s if event.raised else lingers_s)
    end = ProgramEnd(event.local_rank, event.over_s, now_s, event.raised, limit_s)
    if held and held.effects and not event.raised:
        held = replace(held, until_s=max(held.until_s, now_s + EXIT_S))
    words = replace(running.words, ended=(*running.words.ended, end))
    return replace(agent, phase=replace(running, words=words, held=held)), ()


def worker_listens(agent: Agent, running: Running, event: events.WorkerListens, _now_s: float) -> Step:
    """Note what it wants to be told."""
    return replace(agent, phase=replace(running, words=wishes_of(running.words, event))), ()


def worker_stopped(agent: Agent, running: Running, event: events.WorkerStopped, _now_s: float) -> Step:
    """Note that it has come to the step boundary: its agent may hear later why all ranks stop there."""
    words = replace(running.words, stopped=running.words.stopped | {event.local_rank})
    return replace(agent, phase=replace(running, words=words)), ()


def workers_hung(agent: Agent, running: Running, event: events.WorkersHung, now_s: float) -> Step:
    """Count it as a failure like any other."""
    return _fail(agent, running, _cause(running, event.failure), now_s)


def service_lost(agent: Agent, running: Running, event: events.ServiceLost, now_s: float) -> Step:
    """Count it as a failure: stop the workers, if they did not go with it."""
    rest = replace(running, live=frozenset()) if event.workers_too else running
    return _fail(agent, rest, _cause(running, event.failure), now_s)


def signalled(agent: Agent, running: Running, event: events.Signalled, now_s: float) -> Step:
    """Tell the other nodes, pass the signal on to the workers, and exit after the stop."""
    agent = take_signal(agent, event)
    outcome = interrupted(agent, event)
    agent, farewell = say_goodbye(agent, outcome)
    workers = "1 worker" if len(running.live) == 1 else f"{len(running.live)} workers"
    said = answer_to_signal(agent, event, f"stopping {workers}", agent.times.stop_grace_s)
    reason = StopReason.INTERRUPT if event.signum == SIGINT else StopReason.LEAVE
    return _stop_for(agent, running, outcome, reason, event.to_workers, now_s, *farewell, *said)


def tick(agent: Agent, running: Running, _event: events.Tick, now_s: float) -> Step:
    """Count a held end as what it is; kill workers that raised and did not end; give up a head that is lost."""
    if lost := given_up(agent, now_s):
        stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=lost)
        text = "stopping: the head, which serves the job's store, and its ranks are lost"
        return stop_broken(agent, stopping, (Log(text, "error"),))
    agent, said = say_waits(agent, now_s)
    held = running.held
    if held is None or now_s < held.until_s:
        agent, actions = _past_limits(agent, running, now_s)
    elif held.failure:
        agent, actions = _fail(agent, running, held.failure, now_s)
    else:
        agent, actions = clear_up(agent, _done(running, now_s))
    return agent, (*said, *actions)


def due_s(running: Running) -> float | None:
    """When an end is held no longer, or a worker whose program has ended has had its time."""
    limits_s = [end.limit_s for end in running.words.ended if end.local_rank in running.live]
    held_s = [running.held.until_s] if running.held else []
    return min((at_s for at_s in (*held_s, *limits_s) if at_s < math.inf), default=None)


def _past_limits(agent: Agent, running: Running, now_s: float) -> Step:
    """Kill workers that raised an exception and did not end; name those that linger after the end of their programs."""
    times, known = agent.times, running.words.ended
    late = frozenset(e.local_rank for e in known if now_s >= e.limit_s) & running.live
    if not late:
        return agent, ()
    ended = tuple(replace(e, limit_s=math.inf) if e.local_rank in late else e for e in known)
    agent = replace(agent, phase=replace(running, words=replace(running.words, ended=ended)))
    actions: tuple[Action, ...] = ()
    if lingering := late & running.words.returned:
        text = (
            f"the program of local rank {ranks(lingering)} ended {times.hang_after_s + AFTER_HANG_S:.0f} s ago, but its"
            f" process has not exited: elaunch stacks {agent.called} shows what keeps it, elaunch stop {agent.called}"
            " ends the job"
        )
        actions = (Log(text, "warning"), NameThreads(lingering))
    # Seen with torch: the last reference to a process group waits for a thread that waits for the GIL.
    if killed := late - lingering:
        text = f"local rank {ranks(killed)} raised an exception and did not end within {times.stop_grace_s:g} s"
        signal = SignalWorkers(running.table.generation, killed, SIGKILL)
        actions = (*actions, Log(f"{text}; SIGKILL", "warning"), signal)
    return agent, actions


def _done(running: Running, now_s: float) -> Clearing:
    return Clearing(running.table, now_s, ends=running.ends, is_done=True)


def _stop_for(
    agent: Agent, running: Running, outcome: Outcome, reason: StopReason, signum: int, now_s: float, *actions: Action
) -> Step:
    """Stop with time to save, and exit with `outcome`."""
    stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=outcome)
    if running.is_broken:
        return stop_broken(agent, stopping, actions)
    return stop_at_boundary(agent, stopping, reason, signum, actions)


def _end_with_store(agent: Agent, running: Running, outcome: Outcome, now_s: float) -> Step:
    said = Log(f"stopping: {outcome.reason}", "error")
    return _stop_for(agent, running, outcome, StopReason.LEAVE, SIGTERM, now_s, said)


def _stop_with_job(agent: Agent, running: Running, ended: Outcome, now_s: float) -> Step:
    is_person = ended.kind is OutcomeKind.INTERRUPTED
    grace_s = agent.times.stop_grace_s if is_person else grace_of_failure(agent, running)
    stopping = replace(Stopping.of(running, now_s, grace_s), then=ended)
    reason = StopReason.INTERRUPT if is_person else StopReason.LEAVE
    said = Log(f"stopping: the job has ended: {ended.reason}")
    if running.is_broken:
        return stop_broken(agent, stopping, (said,))
    return stop_at_boundary(agent, stopping, reason, _signal_for(agent, running), (said,))


def _make_way(agent: Agent, running: Running, generation: Generation, now_s: float) -> Step:
    """Stop this node's workers for a newer generation: at once where the group is broken, else after a step."""
    times, is_join = agent.times, generation.kind is OpenKind.JOIN
    said = (Log(f"stopping: {generation.cause}", "info" if is_join else "warning"),)
    if generation.kind.is_urgent:
        # The exit status of a rank of this node may be the cause.
        return stop_broken(agent, Stopping.of(running, now_s, _grace_s(agent, running, now_s)), said)
    if running.held and running.held.failure and running.is_broken:
        # No step ends any more, and a node that joins waits for these workers.
        return _fail(agent, running, running.held.failure, now_s)
    reason = StopReason.JOIN if is_join else StopReason.LEAVE
    is_awaited = bool((running.live & running.words.to_stop) - running.words.stopped)
    wait_s = times.boundary_wait_s if is_awaited else 0.0
    stopping = Stopping.of(running, now_s, wait_s + times.stop_grace_s)
    return stop_at_boundary(agent, stopping, reason, _signal_for(agent, running), said, until_s=now_s + wait_s)


def _grace_s(agent: Agent, running: Running, now_s: float) -> float:
    """A failure's grace, and at least the time in which a rank on its way out exits by itself."""
    exit_s = EXIT_S if running.live & running.words.exiting(now_s) else 0.0
    return max(grace_of_failure(agent, running), exit_s)


def _signal_for(agent: Agent, running: Running) -> int:
    """What ends workers that do not listen: SIGTERM, or a scheduler's notice by which another node leaves.

    Where the program has a handler for the notice, SIGTERM would end it unsaved.
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
    """Until when the exit of another rank is awaited, which may explain `failure`; None where it is not."""
    # NCCL's watchdog ends a survivor by SIGABRT; only its output, which is read later, says why.
    is_effect = failure.kind in EFFECTS or failure.code == -SIGABRT
    if not is_effect or (rest.held and not rest.held.effects):
        return None
    # A program that catches the error of a lost peer may end by an exit code. It ended after that peer's.
    over, rank = running.words.over, failure.local_rank
    before = over[: over.index(rank)] if rank in over else over
    if rest.on_way_out(now_s) & {*before}:
        return now_s + EXIT_S
    is_unexplained = failure.kind is FailureKind.PEER_LOST and rest.live and not running.ends
    # On several nodes it is rather a rank of another one, whose agent waits for this word.
    return now_s + UNEXPLAINED_S if is_unexplained and len(running.table.seats) == 1 else None


def _fail(agent: Agent, running: Running, failure: Failure, now_s: float) -> Step:
    """Open the next generation together with the failure that is its cause, then stop the workers that live."""
    live = running.live
    if failure.kind is FailureKind.STARTUP and running.is_first and running.table.progressed:
        return _bow_out(agent, running, failure, now_s)
    failures = _in_order(running, failure)
    failure = decisive_failure((*failures, *running.ends))
    failures = (failure, *(each for each in failures if each.local_rank != failure.local_rank))
    which = "worker" if failure.local_rank in live else "other"
    stopped = f"; stopping {len(live)} {which}{'s' if len(live) > 1 else ''}" if live else ""
    failed = Commit(transactions.fail(agent.snapshot, agent.me, failure))
    said = Log(failure.headline + stopped, "error")
    stopping = replace(Stopping.of(running, now_s, _grace_s(agent, running, now_s)), failures=failures)
    return stop_broken(agent, stopping, (failed, said))


def _in_order(running: Running, failure: Failure) -> tuple[Failure, ...]:
    """`failure` and those that another rank may have caused, in the order in which their programs ended."""
    effects, over = running.held.effects if running.held else (), running.words.over
    known = failure, *(each for each in effects if each.local_rank != failure.local_rank)
    return tuple(sorted(known, key=lambda each: [*over, each.local_rank].index(each.local_rank)))


def _bow_out(agent: Agent, running: Running, failure: Failure, now_s: float) -> Step:
    """A newcomer whose workers cannot even start has something wrong that the healthy job has not: it goes."""
    reason = "it never got past its start on this node, while the job ran on others; they go on without it"
    outcome = agent.outcome(OutcomeKind.FAILED, reason, failure=failure)
    farewell = goodbye(agent, opens=True, why="its workers could not start")
    stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=outcome)
    agent, actions = stop_broken(agent, stopping, (Log(failure.sentence, "error"), *farewell))
    return agent.as_member(is_member=False), actions
