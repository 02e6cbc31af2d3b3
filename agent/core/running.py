"""Phase RUNNING: this node's workers run."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core import hangs
from elaunch.agent.core.actions import Action, Commit, Say, SignalWorkers, StopReason, TakeStacks
from elaunch.agent.core.events import (
    SIGABRT,
    SIGHUP,
    SIGINT,
    SIGKILL,
    SIGPIPE,
    SIGQUIT,
    SIGTERM,
    SIGUSR1,
    SIGUSR2,
    Looked,
    Reported,
    Sampled,
    ServiceLost,
    Signalled,
    StacksTaken,
    StoreLost,
    Tick,
    WorkerAsked,
    WorkerExited,
    WorkerListens,
    WorkerRaised,
    WorkerReturned,
    WorkerSaving,
    WorkersHung,
    WorkerStopped,
)
from elaunch.agent.core.hangs import hear_of_hang
from elaunch.agent.core.leaving import goodbye, interrupted, say_goodbye, take_signal
from elaunch.agent.core.membership import loss_of_keys
from elaunch.agent.core.state import EXIT_S, Agent, Clearing, HeldEnd, Running, Step, Stopping, WorkersDone
from elaunch.agent.core.stopping import (
    NOTICE_S,
    STOPPED_CODES,
    clear_up,
    grace_of_failure,
    ranks,
    stop_at_boundary,
    stop_broken,
    wishes_of,
)
from elaunch.agent.core.store_outage import given_up, say_waits
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.verdict import decisive_failure
from elaunch.rendezvous.types import Failure, FailureKind, Generation, OpenKind, Outcome, OutcomeKind

# Schedulers signal the agent and its workers together; a worker that died so is no failure if our signal comes too.
HOLD_S = 0.1
# Those that somebody sends on purpose.
ASKING = (SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM)
# The same where none is known to be over: its program may still clean up.
UNEXPLAINED_S = 1.0
# How a rank ends that lost a peer, as far as is known before its output is read.
EFFECTS = (FailureKind.PEER_LOST, FailureKind.EXIT_CODE)
# All ranks of a job stop after the same step, also those whose agent has not yet heard why.
STOPPED_HOLD_S = 2.0
# A rank that others wait for is named by the verdict on the hang, and that once.
AFTER_HANG_S = 10.0
# Ranks of a job end at about the same time.
LINGER_TOGETHER_S = 1.0


def looked(agent: Agent, running: Running, _event: Looked, now_s: float) -> Step:
    """Stop the workers if a newer generation was opened or the job has ended."""
    generation, ended, lost = agent.snapshot.generation, agent.snapshot.ended, loss_of_keys(agent)
    if lost:
        return _end_with_store(agent, running, lost, now_s)
    if generation is None:
        return agent, ()
    heard: tuple[Action, ...] = ()
    if agent.snapshot.hang or running.standstill.said:
        running, heard = _hear_of_hang(agent, running)
        agent = replace(agent, phase=running)
    actions: tuple[Action, ...] = ()
    if ended:
        agent, actions = _stop_with_job(agent, running, ended, now_s)
    elif generation.number > running.table.generation:
        agent, actions = _make_way(agent, running, generation, now_s)
    return agent, (*heard, *actions)


def store_lost(agent: Agent, running: Running, event: StoreLost, now_s: float) -> Step:
    """Stop the workers with time to save, then exit."""
    return _end_with_store(agent, running, agent.outcome(OutcomeKind.UNKNOWN, event.why), now_s)


def worker_exited(agent: Agent, running: Running, event: WorkerExited, now_s: float) -> Step:
    """After a failure stop the others and open the next generation; after the last exit with 0 clear up."""
    rest, failure = _without(running, event.local_rank), event.failure
    if event.end and failure is None and event.local_rank not in running.words.stopped:
        rest = replace(rest, ends=(*rest.ends, event.end))
    if event.local_rank in running.words.stopped and event.code in STOPPED_CODES:
        if failure is None and rest.live:
            return replace(agent, phase=rest), ()
        held = running.held or HeldEnd(failure, now_s + STOPPED_HOLD_S, is_stop=True)
        return replace(agent, phase=replace(rest, held=held)), ()
    effects = running.held.effects if running.held else ()
    if failure is None:
        if effects and running.held and not rest.live & (rest.words.exiting(now_s) - rest.words.stopped):
            return _fail(agent, rest, running.held.failure or effects[0], now_s, running.held.told)
        if rest.live or running.held:
            return replace(agent, phase=rest), ()
        return clear_up(agent, Clearing(running.table, now_s, WorkersDone(rest.ends)))
    if -event.code in ASKING and not (running.held and running.held.is_stop):
        held = HeldEnd(failure, now_s + HOLD_S)
        if running.held and running.held.failure not in effects:
            held = running.held
        elif running.held:
            later_s = max(held.until_s, running.held.until_s)
            held = replace(held, until_s=later_s, effects=effects, told=running.held.told)
        return replace(agent, phase=replace(rest, held=held)), ()
    told = tuple(each for each in event.told if each.local_rank in rest.live - running.words.stopped)
    is_unexplained = failure.kind is FailureKind.PEER_LOST and not (running.ends or told)
    if is_unexplained and (looks := _look(agent, rest, failure, now_s)):
        return looks
    if until_s := _awaits_exit(running, rest, failure, told, now_s):
        awaiting = running.held or HeldEnd(failure, until_s, told=told)
        return replace(agent, phase=replace(rest, held=replace(awaiting, effects=(*effects, failure)))), ()
    return _fail(agent, rest, _cause(running, failure), now_s, told)


def worker_raised(agent: Agent, running: Running, event: WorkerRaised, now_s: float) -> Step:
    """Give it time to end by itself, then SIGKILL."""
    if event.local_rank not in running.live:
        return agent, ()
    leaving = (event.local_rank, now_s + agent.times.stop_grace_s)
    words = replace(running.words, over_s=(*running.words.over_s, (event.local_rank, event.over_s)))
    return replace(agent, phase=replace(running, leaving_s=(*running.leaving_s, leaving), words=words)), ()


def worker_returned(agent: Agent, running: Running, event: WorkerReturned, now_s: float) -> Step:
    """Note that it ends by itself: its peers may notice that before its process is gone, which a thread may keep."""
    rank, words, held, after_s = event.local_rank, running.words, running.held, agent.times.hang_after_s
    returned_s, over_s = (*words.returned_s, (rank, now_s)), (*words.over_s, (rank, event.over_s))
    words = replace(words, returned_s=returned_s, over_s=over_s)
    if held and held.effects:
        held = replace(held, until_s=max(held.until_s, now_s + EXIT_S))
    running = replace(running, words=words, held=held)
    if after_s and rank in running.live:
        running = replace(running, lingers_s=(*running.lingers_s, (rank, now_s + after_s + AFTER_HANG_S)))
    return replace(agent, phase=running), ()


def worker_listens(agent: Agent, running: Running, event: WorkerListens, _now_s: float) -> Step:
    """Note what it wants to be told."""
    return replace(agent, phase=replace(running, words=wishes_of(running.words, event))), ()


def worker_saving(agent: Agent, running: Running, event: WorkerSaving, _now_s: float) -> Step:
    """Note that it saves: it may have seen a peer's failure before this agent heard of it."""
    words = replace(running.words, saving=running.words.saving | {event.local_rank})
    return replace(agent, phase=replace(running, words=words)), ()


def worker_stopped(agent: Agent, running: Running, event: WorkerStopped, _now_s: float) -> Step:
    """Note that it has come to the step boundary: its agent may hear later why all ranks stop there."""
    words = replace(running.words, stopped=running.words.stopped | {event.local_rank})
    return replace(agent, phase=replace(running, words=words)), ()


def reported(agent: Agent, running: Running, event: Reported, now_s: float) -> Step:
    """Take the workers' stacks if none of them has reported anything for the hang timeout."""
    quiet = running.quiet.after(event.reports, now_s)
    limit_s = agent.times.hang_timeout_s
    awaited = running.live & event.reporting and not (running.held or running.leaving_s)
    if quiet.is_over or not limit_s or quiet.quiet_s < limit_s or not awaited:
        return replace(agent, phase=replace(running, quiet=quiet)), ()
    agent = replace(agent, phase=replace(running, quiet=replace(quiet, is_over=True)))
    hearing = running.live & running.words.hearing
    return agent, (TakeStacks(running.table.generation, running.live, hearing, quiet.quiet_s),)


def sampled(agent: Agent, running: Running, event: Sampled, now_s: float) -> Step:
    """Count how long all workers have stood still; take their stacks now and then; tell the leader of a change."""
    return hangs.sampled(agent, running, event, now_s)


def stacks_taken(agent: Agent, running: Running, event: StacksTaken, now_s: float) -> Step:
    """Compare the stacks with those of the last look; or name the worker that a collective waited for in vain."""
    if running.held and running.is_broken:
        if named := hangs.judged(agent, running, event.stacks):
            return named
        shown = hangs.shown(agent, running, event.stacks)
        agent, actions = _end_look(agent, running, running.held, now_s)
        return agent, (*shown, *actions)
    return hangs.stacks_taken(agent, running, event, now_s)


def workers_hung(agent: Agent, running: Running, event: WorkersHung, now_s: float) -> Step:
    """Count it as a failure like any other, or only warn of it: their stacks are taken."""
    # A collective that timed out has ended the group: whom it waited for is the failure.
    if not agent.restarts_hung and not running.held:
        way_out = f"to restart the workers: elaunch restart {agent.called}"
        return agent, (Say(f"the job seems to hang: {event.failure.sentence}\n  {way_out}", "warning"),)
    return _fail(agent, running, _cause(running, event.failure), now_s)


def worker_asked(agent: Agent, running: Running, event: WorkerAsked, now_s: float) -> Step:
    """Count it as a failure that ends the job."""
    return _fail(agent, running, event.failure, now_s)


def service_lost(agent: Agent, running: Running, event: ServiceLost, now_s: float) -> Step:
    """Count it as a failure: stop the workers, if they did not go with it."""
    rest = replace(running, live=frozenset()) if event.workers_too else running
    return _fail(agent, rest, _cause(running, event.failure), now_s)


def signalled(agent: Agent, running: Running, event: Signalled, now_s: float) -> Step:
    """Tell the other nodes, pass the signal on to the workers, and exit after the stop."""
    agent, unheard = take_signal(agent, event)
    outcome = interrupted(agent, event)
    agent, farewell = say_goodbye(agent, outcome)
    # Whoever closes a pipe (`| head`) expects no more words.
    said = () if event.signum == SIGPIPE else (Say(_farewell_text(agent, event, len(running.live))),)
    reason = StopReason.INTERRUPT if event.signum == SIGINT else StopReason.LEAVE
    agent, actions = _stop_for(agent, running, outcome, reason, event.to_workers, now_s, *farewell, *said)
    return agent, (*actions, *unheard)


def tick(agent: Agent, running: Running, _event: Tick, now_s: float) -> Step:
    """Count a held end as what it is; kill workers that raised and did not end; give up a head that is lost."""
    if lost := given_up(agent, now_s):
        stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=lost)
        text = "stopping: the head, which serves the job's store, and its ranks are lost"
        return stop_broken(agent, stopping, (Say(text, "error"),))
    agent, said = say_waits(agent, now_s)
    agent, running, named = _name_lingering(agent, running, now_s)
    said = (*said, *named)
    held = running.held
    if held and now_s >= held.until_s:
        if running.is_broken:
            agent, actions = _end_look(agent, running, held, now_s)
        elif held.failure:
            agent, actions = _fail(agent, running, held.failure, now_s, held.told)
        else:
            agent, actions = clear_up(agent, Clearing(running.table, now_s, WorkersDone(running.ends)))
    else:
        agent, actions = _kill_late(agent, running, now_s)
    return agent, (*said, *actions)


def due_s(running: Running) -> float | None:
    """When an end is held no longer, or a worker whose program has ended has had its time."""
    held_s = [running.held.until_s] if running.held else []
    return min([*held_s, *(at_s for _, at_s in (*running.leaving_s, *running.lingers_s))], default=None)


def _name_lingering(agent: Agent, running: Running, now_s: float) -> tuple[Agent, Running, tuple[Action, ...]]:
    """Name workers whose programs have ended long ago; with them those that ended just after."""
    if not any(now_s >= at_s for _, at_s in running.lingers_s):
        return agent, running, ()
    late = {rank: at_s for rank, at_s in running.lingers_s if now_s >= at_s - LINGER_TOGETHER_S}
    running = replace(running, lingers_s=tuple(each for each in running.lingers_s if each[0] not in late))
    agent = replace(agent, phase=running)
    if running.standstill.said:
        return agent, running, ()
    said = (
        f"the program of local rank {ranks(frozenset(late))} ended {agent.times.hang_after_s + AFTER_HANG_S:.0f} s ago,"
        f" but its process has not exited: elaunch stacks {agent.called} shows what keeps it, elaunch stop"
        f" {agent.called} ends the job"
    )
    return agent, running, (Say(said, "warning"),)


def _kill_late(agent: Agent, running: Running, now_s: float) -> Step:
    late = frozenset(rank for rank, until_s in running.leaving_s if now_s >= until_s)
    if not late:
        return agent, ()
    # Seen with torch: the last reference to a process group waits for a thread that waits for the GIL.
    rest = tuple((rank, until_s) for rank, until_s in running.leaving_s if rank not in late)
    grace_s = agent.times.stop_grace_s
    text = f"local rank {ranks(late)} raised an exception and did not end within {grace_s:g} s; SIGKILL"
    actions = (Say(text, "warning"), SignalWorkers(running.table.generation, late, SIGKILL))
    return replace(agent, phase=replace(running, leaving_s=rest)), actions


def _stop_for(
    agent: Agent, running: Running, outcome: Outcome, reason: StopReason, signum: int, now_s: float, *actions: Action
) -> Step:
    """Stop with time to save, and exit with `outcome`."""
    stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=outcome)
    if running.has_lost_step:
        return stop_broken(agent, stopping, actions)
    return stop_at_boundary(agent, stopping, reason, signum, actions)


def _end_with_store(agent: Agent, running: Running, outcome: Outcome, now_s: float) -> Step:
    said = Say(f"stopping: {outcome.reason}", "error")
    return _stop_for(agent, running, outcome, StopReason.LEAVE, SIGTERM, now_s, said)


def _stop_with_job(agent: Agent, running: Running, ended: Outcome, now_s: float) -> Step:
    is_person = ended.kind is OutcomeKind.INTERRUPTED
    grace_s = agent.times.stop_grace_s if is_person else grace_of_failure(agent, running)
    signum, at_s = _signal_for(agent, agent.snapshot.generation, running, now_s)
    # The time to save begins when they are told.
    stopping = replace(Stopping.of(running, now_s, grace_s + (NOTICE_S if at_s else 0.0)), then=ended)
    reason = StopReason.INTERRUPT if is_person else StopReason.LEAVE
    said = Say(f"stopping: the job has ended: {ended.reason}")
    if running.has_lost_step:
        return stop_broken(agent, stopping, (said,))
    return stop_at_boundary(agent, stopping, reason, signum, (said,), signal_at_s=at_s)


def _why_stopping(running: Running, generation: Generation) -> Say:
    return Say(
        f"stopping: {_once(running, generation.cause)}", "info" if generation.kind is OpenKind.JOIN else "warning"
    )


def _make_way(agent: Agent, running: Running, generation: Generation, now_s: float) -> Step:
    """Stop this node's workers for a newer generation: at once where the group is broken, else after a step."""
    times, said = agent.times, (_why_stopping(running, generation),)
    if generation.kind.is_urgent:
        if running.is_broken:
            # At the end of the look this node may know which rank was not there.
            return agent, ()
        return _look_for(agent, running, generation.cause, None, now_s) or _make_way_now(agent, running, now_s)
    if running.held and running.has_lost_step:
        # No step ends any more, and a node that joins waits for these workers.
        return _end_look(agent, running, running.held, now_s)
    reason = StopReason.JOIN if generation.kind is OpenKind.JOIN else StopReason.LEAVE
    is_awaited = bool((running.live & running.words.to_stop) - running.words.stopped)
    wait_s = times.boundary_wait_s if is_awaited else 0.0
    stopping = Stopping.of(running, now_s, wait_s + times.stop_grace_s)
    signum, at_s = _signal_for(agent, generation, running, now_s)
    return stop_at_boundary(agent, stopping, reason, signum, said, until_s=now_s + wait_s, signal_at_s=at_s)


def _make_way_now(agent: Agent, running: Running, now_s: float) -> Step:
    generation = agent.snapshot.generation
    assert generation
    said = _why_stopping(running, generation)
    # The exit status of a rank of this node may be the cause.
    return stop_broken(agent, Stopping.of(running, now_s, _grace_s(agent, running, now_s)), (said,))


def _grace_s(agent: Agent, running: Running, now_s: float) -> float:
    """A failure's grace, and at least the time in which a rank on its way out exits by itself."""
    exit_s = EXIT_S if running.live & running.words.exiting(now_s) else 0.0
    return max(grace_of_failure(agent, running), exit_s)


def _look(agent: Agent, rest: Running, failure: Failure, now_s: float) -> Step | None:
    """After the end of a worker by a collective that timed out, find the worker that did not come, if there is one."""
    if rest.is_broken:
        return replace(agent, phase=rest), ()
    return None if rest.held else _look_for(agent, rest, failure.sentence, failure, now_s)


def _look_for(agent: Agent, running: Running, sentence: str, failure: Failure | None, now_s: float) -> Step | None:
    return hangs.look(agent, running, sentence, failure, now_s)


def _end_look(agent: Agent, running: Running, held: HeldEnd, now_s: float) -> Step:
    """No worker of this node was missed, as far as could be seen in time: go on as for any failure."""
    if held.failure:
        return _fail(agent, running, held.failure, now_s, held.told)
    return _make_way_now(agent, replace(running, held=None), now_s)


def _hear_of_hang(agent: Agent, running: Running) -> tuple[Running, tuple[Action, ...]]:
    return hear_of_hang(agent, running)


def _signal_for(
    agent: Agent, generation: Generation | None, running: Running, now_s: float
) -> tuple[int, float | None]:
    """What ends workers that do not listen, and when: SIGTERM now, or a notice by which another node leaves.

    Where the program has a handler for the notice, SIGTERM would end it unsaved. A scheduler sends it to all nodes,
    and where it sends it to all processes, these workers are to get it once: so this node waits for its own.
    """
    if generation and generation.number > running.table.generation and generation.signum in agent.notices:
        return generation.signum, now_s + min(NOTICE_S, agent.times.boundary_wait_s)
    return SIGTERM, None


def _cause(running: Running, failure: Failure) -> Failure:
    """The first cause: a held failure, else this one.

    A held stop at a step boundary is no failure, and a collective that timed out or lost a peer has a cause, which is
    this one.
    """
    held = running.held
    is_cause = held and held.failure not in (None, *held.effects) and not (held.is_stop or held.timed_out)
    return held.failure if held and held.failure and is_cause else failure


def _awaits_exit(
    running: Running, rest: Running, failure: Failure, told: tuple[Failure, ...], now_s: float
) -> float | None:
    """Until when the exit of another rank is awaited, which may explain `failure`; None where it is not."""
    # NCCL's watchdog ends a survivor by SIGABRT; only its output, which is read later, says why.
    is_effect = failure.kind in EFFECTS or failure.code == -SIGABRT
    if not is_effect or (rest.held and not rest.held.effects):
        return None
    over, rank = running.words.over, failure.local_rank
    is_lost = failure.kind is FailureKind.PEER_LOST
    # A program that catches the error of a lost peer may end by an exit code. It ended after that peer's.
    before = over[: over.index(rank)] if rank in over and not is_lost else over
    if any(each.kind is not FailureKind.ENDED_EARLY for each in told):
        return None
    # On a full disk no rank that raised has a record.
    leaving = running.words.exiting(now_s) | {rank for rank, _ in rest.leaving_s if not is_lost}
    if told or rest.live & leaving & {*before} - running.words.stopped:
        return now_s + EXIT_S
    is_unexplained = is_lost and rest.live and not running.ends
    # On several nodes it is rather a rank of another one, whose agent waits for this word.
    return now_s + UNEXPLAINED_S if is_unexplained and len(running.table.seats) == 1 else None


def _without(running: Running, local_rank: int) -> Running:
    leaving_s = tuple((rank, until_s) for rank, until_s in running.leaving_s if rank != local_rank)
    lingers_s = tuple(each for each in running.lingers_s if each[0] != local_rank)
    return replace(running, live=running.live - {local_rank}, leaving_s=leaving_s, lingers_s=lingers_s)


def _fail(agent: Agent, running: Running, failure: Failure, now_s: float, told: tuple[Failure, ...] = ()) -> Step:
    """Open the next generation together with the failure that is its cause, then stop the workers that live.

    `told` are the records of workers that live and whose programs have ended: see `WorkerExited`.
    """
    live = running.live
    if failure.kind is FailureKind.STARTUP and running.is_first and running.table.progressed:
        return _bow_out(agent, running, failure, now_s)
    failures = _in_order(running, failure)
    failure = decisive_failure((*failures, *running.ends, *told))
    failures = (failure, *(each for each in failures if each.local_rank != failure.local_rank))
    which = "worker" if failure.local_rank in live else "other"
    stopped = f"; stopping {len(live)} {which}{'s' if len(live) > 1 else ''}" if live else ""
    failed = Commit(transactions.fail(agent.snapshot, agent.me, failure))
    said = Say(_once(running, failure.headline) + stopped, "error")
    stopping = replace(Stopping.of(running, now_s, _grace_s(agent, running, now_s)), failures=failures)
    return stop_broken(agent, stopping, (failed, said))


def _in_order(running: Running, failure: Failure) -> tuple[Failure, ...]:
    """`failure` and those that another rank may have caused, in the order in which their programs ended."""
    effects, over = running.held.effects if running.held else (), running.words.over
    known = failure, *(each for each in effects if each.local_rank != failure.local_rank)
    return tuple(sorted(known, key=lambda each: [*over, each.local_rank].index(each.local_rank)))


def _once(running: Running, sentence: str) -> str:
    """The sentence; a shorter one if it is that of a hang, which the log has."""
    hang = running.standstill.said
    return "the hang counts as a failure (--on-hang restart)" if hang and hang in sentence else sentence


def _bow_out(agent: Agent, running: Running, failure: Failure, now_s: float) -> Step:
    """A newcomer whose workers cannot even start has something wrong that the healthy job has not: it goes."""
    reason = "it never got past its start on this node, while the job ran on others; they go on without it"
    outcome = agent.outcome(OutcomeKind.FAILED, reason, failure=failure)
    farewell = goodbye(agent, opens=True, why="its workers could not start")
    stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=outcome)
    agent, actions = stop_broken(agent, stopping, (Say(failure.sentence, "error"), *farewell))
    return agent.as_member(is_member=False), actions


def _farewell_text(agent: Agent, event: Signalled, live: int) -> str:
    workers = "1 worker" if live == 1 else f"{live} workers"
    part = "leaving the job, " if agent.spec.nodes_max > 1 and event.signum != SIGINT else ""
    return f"{event.name}: {part}stopping {workers}, SIGKILL in {agent.times.stop_grace_s:g} s{event.how_to_kill}"
