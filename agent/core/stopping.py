"""How an agent stops its workers: signals, deadlines, clearing up, and what comes after."""

from __future__ import annotations

import math
from dataclasses import replace

from elaunch.agent.core.events import (
    Action,
    Clear,
    Cleared,
    Commit,
    ReplaceForkServer,
    Say,
    Signalled,
    SignalWorkers,
)
from elaunch.agent.core.failures import with_tail
from elaunch.agent.core.membership import joining
from elaunch.agent.core.messages import StopReason
from elaunch.agent.core.state import Agent, Finished, Joining, Phase, Running, Step, Stopping, exit_with
from elaunch.agent.core.stop_orders import (
    SIGINT,
    SIGKILL,
    pass_notice_on,
    past_boundary,
    past_grace_of_failure,
    ranks,
    stop_at_boundary,
)
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.verdict import decisive_failure
from elaunch.rendezvous.types import Outcome, OutcomeKind

# SIGKILL needs no consent: a worker that is not gone by then is one whose fork server no longer says so.
KILL_WAIT_S = 5.0
# After a stop's last worker, its output may take so long to be read by whoever reads it.
LAST_WORDS_S = 2.0
_UNHEARD = "so the other nodes may not hear of it: press Ctrl-C there too"


def go_on_stopping(agent: Agent, stopping: Stopping, actions: tuple[Action, ...] = ()) -> Step:
    """Wait for whoever lives, or clear up after the last one."""
    agent = replace(agent, phase=stopping)
    return agent, (actions if stopping.live else (*actions, Clear(stopping.table.generation)))


def stop_for(
    agent: Agent, running: Running, outcome: Outcome, reason: StopReason, signum: int, now_s: float, *actions: Action
) -> Step:
    """Stop with time to save, and exit with `outcome`."""
    stopping = replace(Stopping.of(running, now_s, agent.times.stop_grace_s), then=outcome)
    return stop_at_boundary(agent, stopping, reason, signum, actions)


def signalled(agent: Agent, event: Signalled, now_s: float) -> Step:
    """SIGINT ends the job, any other signal this node's part in it; a second SIGINT waits for nobody."""
    if event.signum != SIGINT:
        return _asked_to_stop(agent, event, now_s)
    match agent.phase:
        case Stopping() as stopping if agent.is_interrupted:
            return _hurry_out(agent, stopping, now_s)
    is_away = agent.reach.failing_since_s is not None or agent.store_gone
    is_cut_off = is_away and agent.membership.belongs and not agent.snapshot.ended
    agent, actions = _asked_to_stop(replace(agent, is_interrupted=True), event, now_s)
    said = Say(f"the store {agent.reach.trouble.value}, {_UNHEARD}")
    return agent, (*actions, said) if is_cut_off and agent.spec.nodes_max > 1 else actions


def _hurry_out(agent: Agent, stopping: Stopping, now_s: float) -> Step:
    """A person's second word."""
    if stopping.live and not stopping.killed:
        return _kill(agent, stopping, now_s, Say("SIGINT again: killing the workers now"))
    if not stopping.live and stopping.then:
        # Only output is left, and whoever reads it does not.
        return exit_with(agent, stopping.then)
    return agent, ()


def _asked_to_stop(agent: Agent, event: Signalled, now_s: float) -> Step:
    outcome = _interrupted(agent, event)
    reason = StopReason.INTERRUPT if event.signum == SIGINT else StopReason.LEAVE
    match agent.phase:
        case Running(live=live) as running:
            agent, farewell = _say_goodbye(agent, outcome)
            said = Say(_farewell_text(agent, event, len(live)))
            return stop_for(agent, running, outcome, reason, event.signum, now_s, *farewell, said)
        case Stopping(then=None, done=False, live=live) as stopping:
            agent, farewell = _say_goodbye(agent, outcome)
            stopping = replace(stopping, then=outcome)
            if not live:
                return replace(agent, phase=replace(stopping, kill_at_s=now_s + LAST_WORDS_S)), farewell
            stopping = stopping.hurried(now_s, agent.times.stop_grace_s)
            return stop_at_boundary(agent, stopping, reason, event.signum, farewell)
        case Stopping(then=None, done=True, summons=summons) as stopping if not summons or event.signum == SIGINT:
            return replace(agent, phase=replace(stopping, summons=event, kill_at_s=now_s + LAST_WORDS_S)), ()
        case Stopping(then=Outcome(), notice_at_s=float(), live=live) as stopping if live and event.signum != SIGINT:
            # The job ends of what another node was told, and now this one is.
            return pass_notice_on(agent, replace(stopping, signum=event.signum))
        case Stopping(then=Outcome() as then) as stopping if event.signum == SIGINT:
            # For something else, as the end that the same Ctrl-C has brought on another node a moment ago.
            agent, farewell = _end_of_own_run(agent, stopping, outcome)
            if not stopping.live:
                agent, more = exit_with(agent, then)
                return agent, (*farewell, *more)
            ends = "the whole job ends; " if farewell and agent.spec.nodes_max > 1 else ""
            left_s = max(0, math.ceil(stopping.kill_at_s - now_s))
            text = f"{event.name}: {ends}stopping already, SIGKILL in {left_s} s; Ctrl-C again kills now"
            return agent, farewell if stopping.killed else (*farewell, Say(text))
        case Joining() | Finished():
            agent, farewell = _say_goodbye(agent, outcome)
            agent, more = exit_with(agent, outcome)
            return agent, (*farewell, *more)
    return agent, ()


def stopping_deadline_s(phase: Phase) -> float | None:
    match phase:
        case Stopping(live=live, then=then, summons=summons, kill_at_s=kill_at_s) if live or then or summons:
            sooner = [at_s for at_s in (phase.boundary_until_s, phase.notice_at_s) if live and at_s is not None]
            return min([kill_at_s, *sooner])
    return None


def tick_stopping(agent: Agent, stopping: Stopping, now_s: float) -> Step:
    if stopping.live and stopping.notice_at_s is not None and now_s >= stopping.notice_at_s:
        return pass_notice_on(agent, stopping)
    if stopping.live and stopping.boundary_until_s is not None and now_s >= stopping.boundary_until_s:
        return past_boundary(agent, stopping, now_s)
    if now_s < stopping.kill_at_s:
        return agent, ()
    if not stopping.live:
        # Only output is left, and whoever reads it does not.
        if stopping.summons:
            agent, actions = _go_on(agent, stopping)
            agent, more = _asked_to_stop(agent, stopping.summons, now_s)
            return agent, (*actions, *more)
        return exit_with(agent, stopping.then) if stopping.then else (agent, ())
    if stopping.killed:
        return replace(agent, phase=replace(stopping, kill_at_s=now_s + KILL_WAIT_S)), (
            Say(
                f"local rank {ranks(stopping.live)} did not end {KILL_WAIT_S:g} s after SIGKILL;"
                " replacing the fork server"
            ),
            ReplaceForkServer(stopping.table.generation),
        )
    if not stopping.saving:
        said = Say(f"local rank {ranks(stopping.live)} still ran after {stopping.grace_s:g} s; SIGKILL")
        return _kill(agent, stopping, now_s, said)
    until_s = stopping.kill_at_s - stopping.grace_s + agent.times.stop_grace_s
    if now_s < until_s:
        return past_grace_of_failure(agent, stopping, until_s)
    late = f"local rank {ranks(stopping.saving)} was still saving {stopping.grace_s:g} s after the failure; SIGKILL"
    return _kill(agent, stopping, now_s, Say(late))


def cleared(agent: Agent, stopping: Stopping, event: Cleared, now_s: float) -> Step:
    """No process of the generation is left: complete the record of its failure, then exit, be done or join again."""
    agent = replace(agent, progressed=event.progressed)
    actions: tuple[Action, ...] = ()
    then = stopping.then
    if stopping.failure or (then and then.failure):
        agent, actions, then = _complete(agent, stopping, event, then)
    if then:
        agent, more = exit_with(agent, then)
        return agent, (*actions, *more)
    agent, more = _go_on(agent, stopping)
    actions = (*actions, *more)
    # A node alone has ended well with that, whatever signal came meanwhile.
    if stopping.summons and agent.spec.nodes_max > 1:
        agent, more = _asked_to_stop(agent, stopping.summons, now_s)
        actions = (*actions, *more)
    return agent, actions


def _go_on(agent: Agent, stopping: Stopping) -> Step:
    """Be done, or join again."""
    newest, number = agent.snapshot.generation, stopping.table.generation
    if stopping.done and newest and newest.number == number:
        done = Commit(transactions.report_done(agent.snapshot, agent.me, number))
        return replace(agent, phase=Finished(stopping.table)), (done,)
    return joining(agent, number), ()


def _complete(
    agent: Agent, stopping: Stopping, event: Cleared, then: Outcome | None
) -> tuple[Agent, tuple[Action, ...], Outcome | None]:
    """Whether an exit was only a word about a lost peer may show in the output, which is here now."""
    mine = agent.me.node_id
    if not stopping.failure:
        # The outcome of a node that bows out alone.
        if then and then.failure and then.failure.node_id == mine:
            whole = with_tail(then.failure, event.tails.get(then.failure.local_rank, ""), event.reached_store)
            then = replace(then, failure=whole)
        return agent, (), then
    failures = (stopping.failure, *stopping.others)
    whole = decisive_failure([with_tail(f, event.tails.get(f.local_rank, ""), event.reached_store) for f in failures])
    actions: tuple[Action, ...] = tuple(map(Commit, transactions.complete(agent.snapshot, agent.me, whole)))
    if whole.local_rank != stopping.failure.local_rank:
        # A worker that dies while it writes to a disk is gone later than its peers notice and give up.
        actions = (*actions, Say(f"the cause: {whole.sentence}"))
    if then and then.failure == stopping.failure:
        then = replace(then, failure=whole)
    return agent, actions, then


def _kill(agent: Agent, stopping: Stopping, now_s: float, said: Say) -> Step:
    stopping = replace(stopping, killed=True, boundary_until_s=None, notice_at_s=None, kill_at_s=now_s + KILL_WAIT_S)
    return replace(agent, phase=stopping), (said, SignalWorkers(stopping.table.generation, stopping.live, SIGKILL))


def _say_goodbye(agent: Agent, outcome: Outcome) -> tuple[Agent, tuple[Action, ...]]:
    """Tell the others before touching a worker: SIGINT is a person's and ends the job; else only this node goes."""
    snapshot = agent.snapshot
    if snapshot.generation is None or snapshot.ended:
        return agent, ()
    if outcome.signum == SIGINT and agent.membership.belongs:
        return agent, (Commit(transactions.end_job(snapshot, outcome)),)
    table = snapshot.current_table
    is_seated = table is not None and table.group_rank(agent.me.node_id) is not None
    opens = is_seated and not isinstance(agent.phase, Finished)
    return agent.as_member(is_member=False), goodbye(agent, opens=opens, why=outcome.reason, signum=outcome.signum)


def _end_of_own_run(agent: Agent, stopping: Stopping, outcome: Outcome) -> tuple[Agent, tuple[Action, ...]]:
    """The end of the job for all, unless those that this node leaves have ended it, and others begun another."""
    newest = agent.snapshot.generation
    if newest and newest.number > stopping.table.generation + 1:
        return agent, ()
    return _say_goodbye(agent, outcome)


def goodbye(agent: Agent, *, opens: bool, why: str, signum: int = 0) -> tuple[Action, ...]:
    """This node goes, and says so; where it leads, others may do so at once."""
    snapshot = agent.snapshot
    left: tuple[Action, ...] = (Commit(transactions.leave(snapshot, agent.me, opens=opens, why=why, signum=signum)),)
    return (*left, Commit(transactions.resign(snapshot))) if snapshot.leader == agent.me.node_id else left


def _farewell_text(agent: Agent, event: Signalled, live: int) -> str:
    workers = "1 worker" if live == 1 else f"{live} workers"
    again = "; Ctrl-C again kills now" if event.signum == SIGINT else ""
    part = "leaving the job, " if agent.spec.nodes_max > 1 and event.signum != SIGINT else ""
    return f"{event.name}: {part}stopping {workers}, SIGKILL in {agent.times.stop_grace_s:g} s{again}"


def _interrupted(agent: Agent, event: Signalled) -> Outcome:
    where = f" by {agent.me.host}" if agent.spec.nodes_max > 1 else ""
    return agent.outcome(OutcomeKind.INTERRUPTED, f"{event.name} was received{where}", signum=event.signum)
