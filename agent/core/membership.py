"""The agent's part in the job's rendezvous: its lease, entering, joining generations, leading, and leaving the job.

With phase JOINING, in which no worker of the node runs: it enters the job, joins its generations, waits for a seat.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from signal import SIGINT, SIGPIPE

from elaunch.agent.core import events
from elaunch.agent.core.actions import Actions, Commit, Join, Log, Renew, Spawn, Widen
from elaunch.agent.core.events import ENDS_JOB, SHELL_BASE, RestartOrdered, Signalled, Tag
from elaunch.agent.core.state import LOG_AFTER_S, Agent, Finished, Joining, Phase, Running, Step, Waiting, exit_with
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.assign_ranks import newcomers_of, role_sizes
from elaunch.rendezvous.rules.form_generation import CAUSE
from elaunch.rendezvous.rules.leader import lead
from elaunch.rendezvous.rules.queries import Topic
from elaunch.rendezvous.rules.restart_policy import exclusion_of
from elaunch.rendezvous.rules.transactions import become_leader, confirm_membership, return_as_member, start_run
from elaunch.rendezvous.types import UNNAMED, Outcome, OutcomeKind, RankTable, Terms, host_of, job_name


def leased(agent: Agent, _phase: Phase, event: events.Leased, _now_s: float) -> Step:
    """Take the new lease; a node with workers rejoins with it as the same node, any other as a new one."""
    agent = agent.as_member(lease=event.lease, next_id=event.node_id)
    return with_own_id(agent) if isinstance(agent.phase, Joining) else agent, ()


def lease_lost(agent: Agent, _phase: Phase, event: events.LeaseLost, now_s: float) -> Step:
    """Request another lease; no node is declared lost for a while, as others may be partitioned too."""
    if event.lease != agent.membership.lease:
        return agent, ()
    agent = agent.as_member(lease=0, is_member=False, evicted=False)
    if isinstance(agent.phase, Joining):
        agent = replace(agent, phase=replace(agent.phase, joined=-1))
    # Else repeated expiries would hide each loss for ever.
    if now_s >= agent.lossless_until_s + agent.times.return_grace_s:
        agent = replace(agent, lossless_until_s=now_s + agent.times.return_grace_s)
    if agent.ending:
        return agent, ()
    due_s = agent.membership.renewed_s + agent.times.keepalive_s
    if now_s >= due_s:
        return agent.as_member(renewed_s=now_s), (Renew(),)
    # Else a client that revokes each new lease would make this node saturate the store with requests.
    return replace(agent.as_member(renew_at_s=due_s, renewed_s=due_s), lead_at_s=due_s), ()


# A node logs what it waits for at most once in this time.
LOG_AGAIN_S = 5.0
# The invitation to other nodes is logged again after this wait: it has scrolled away by then.
INVITE_AGAIN_S = 60.0
# One try per lease time: after these, any lease has expired, even if the store was unreachable at the first.
RUNS_REFUSED_MAX = 4
# If one of these transactions succeeds, it writes keys that followers watch, so they see its revision immediately.
# The other transactions write no such keys, so followers may see their revision a lease time later.
_WATCHED = (Tag.RUN, Tag.ELECT, Tag.LEAD)


def attend(agent: Agent, now_s: float) -> Step:
    """The next transaction of the node, for itself or as the leader: one at a time, decided from a fresh snapshot."""
    member, snapshot = agent.membership, agent.snapshot
    if agent.ending:
        return agent, ()
    if not member.lease:
        if member.renew_at_s is None:
            return agent, ()
        if now_s < member.renew_at_s:
            return replace(agent, lead_at_s=member.renew_at_s), ()
        return agent.as_member(renew_at_s=None), (Renew(),)
    if member.in_flight or not snapshot.revision or snapshot.revision < member.answered:
        return agent, ()
    if member.refused:
        return _refused(agent, now_s)
    if member.evicted:
        return _evicted(agent)
    if not member.is_member:
        return _enter(agent, now_s)
    match agent.phase:
        case Joining(joined=joined, ran=ran) as joining if snapshot.generation and not snapshot.ended:
            if max(joined, ran) < snapshot.generation.number:
                return _join(agent, joining)
    return _lead(agent, now_s)


def committed(agent: Agent, _phase: Phase, event: events.Committed, _now_s: float) -> Step:
    """Take the store's response to this node's transaction."""
    member = agent.membership
    if event.tag is not member.in_flight:
        return agent, ()
    agent = agent.as_member(in_flight=None)
    # After a refusal the keys are read again.
    if event.tag in _WATCHED or not event.held:
        agent = agent.as_member(answered=max(member.answered, event.revision))
    match event.tag:
        case Tag.RUN | Tag.JOIN if event.held:
            agent = agent.as_member(belongs=True, is_member=member.lease != 0, has_entered=True)
        case Tag.RUN if event.revision:
            # The existing run is the one to join, unless this node does not fit it.
            agent = agent.as_member(belongs=not member.is_misfit, runs_refused=member.runs_refused + 1)
        case Tag.JOIN:
            agent = agent.as_member(refused=True)
        case Tag.RETURN if event.held and member.lease:
            agent = agent.as_member(is_member=True, next_id="")
        case Tag.ELECT:
            agent = agent.as_member(outvoted=not event.held)
        case Tag.STANDING:
            agent = agent.as_member(outvoted=False, evicted=not event.held and member.is_member)
    return agent, ()


def with_own_id(agent: Agent) -> Agent:
    """Take up the next id, unless the node's keys still exist."""
    member = agent.membership
    if member.is_member or not member.next_id:
        return agent
    return replace(agent.as_member(next_id=""), me=replace(agent.me, node_id=member.next_id))


def join_again(agent: Agent, ran: int) -> Agent:
    """Return to Joining after the workers of generation `ran` have exited."""
    return with_own_id(replace(agent, phase=Joining(ran=ran)))


def belongs_to_run(agent: Agent) -> bool:
    """Whether the run in the store is this node's.

    The snapshot may still be the old run's, if this node has just started one over it.
    """
    member, snapshot = agent.membership, agent.snapshot
    is_fit = member.has_entered or _mismatch(agent, snapshot.terms) is None
    return member.belongs and snapshot.revision >= member.answered and is_fit


def loss_of_keys(agent: Agent) -> Outcome | None:
    """The outcome if the job's keys existed and are gone."""
    if agent.snapshot.generation is not None or agent.table_seen[0] < 0:
        return None
    why = f"the keys of the {job_name(agent.spec.run_id)} are gone from the store"
    return agent.outcome(OutcomeKind.UNKNOWN, why)


def outcome_in_store(agent: Agent) -> Outcome | None:
    """The outcome for a node without workers: the job's keys are gone, or the job has ended."""
    generation, ended = agent.snapshot.generation, agent.snapshot.ended
    return loss_of_keys(agent) or (ended if generation and belongs_to_run(agent) else None)


def log_wait(agent: Agent, now_s: float) -> Step:
    """Log what a long wait is for."""
    waiting = agent.waiting
    if waiting.due_s is None or now_s < waiting.due_s:
        return agent, ()
    if waiting.is_logged:
        return replace(agent, waiting=replace(waiting, due_s=None)), (Log(agent.invitation),)
    # Nodes that ran together have found each other.
    have_met = agent.table_seen[0] >= 0 or waiting.logged_s >= 0
    only_here = f"; {agent.only_here}" if agent.only_here and not have_met else ""
    logged = Log(f"waiting for {waiting.text}{only_here}", "warning" if only_here else "info")
    again_s = now_s + INVITE_AGAIN_S if agent.invitation and isinstance(agent.phase, Joining) else None
    return replace(agent, waiting=replace(waiting, due_s=again_s, logged_s=now_s, is_logged=True)), (logged,)


def _enter(agent: Agent, now_s: float) -> Step:
    snapshot, member = agent.snapshot, agent.membership
    match agent.phase:
        case Joining() as joining:
            refusal = _mismatch(agent, snapshot.terms)
            if member.is_misfit and refusal:
                return exit_with(agent, refusal)
            if snapshot.generation is None or (snapshot.ended and not belongs_to_run(agent)):
                return _start_run(agent, now_s)
            if snapshot.ended:
                return agent, ()
            if refusal:
                # That job may be dead: then its members are gone, and this node can start its own.
                agent, actions = _start_run(agent.as_member(belongs=False), now_s)
                return agent.as_member(is_misfit=bool(actions)), actions
            if not snapshot.leader and not member.belongs:
                return _start_run(agent, now_s)
            agent = agent.as_member(is_misfit=False)
            return _join(agent, joining)
        case Running(table=table) | Finished(table=table):
            newest = snapshot.generation
            if newest and newest.number == table.generation and not snapshot.ended:
                back = return_as_member(snapshot, agent.me, member.lease)
                return agent.as_member(in_flight=Tag.RETURN), (Commit(back, Tag.RETURN),)
    return agent, ()


def _start_run(agent: Agent, now_s: float) -> Step:
    """Begin the job, unless it has members. Members without a generation are orphans of a job that has ended."""
    snapshot, member = agent.snapshot, agent.membership
    was_away = agent.reach.failing_since_s is not None or now_s < agent.lossless_until_s
    if snapshot.generation and not snapshot.ended and was_away:
        # The job's nodes may have been partitioned too: their leases have expired, and they may return soon.
        return replace(agent, lead_at_s=now_s + agent.times.return_grace_s), ()
    if snapshot.generation is None or snapshot.ended:
        # Remaining members have leases that expire, or none at all. The first refusal may be due to a start of another
        # node, whose run has ended since.
        tolerated = 1 if snapshot.ended else 0
        if member.runs_refused > tolerated and now_s < member.run_again_s:
            left = f"members that an earlier {job_name(agent.spec.run_id)} left in the store; their leases must expire"
            return replace(_wait(agent, left, now_s), lead_at_s=member.run_again_s), ()
        if snapshot.generation is None and member.runs_refused >= RUNS_REFUSED_MAX:
            reason = (
                f"the store holds members of the {job_name(agent.spec.run_id)} but no generation, which is not a job;"
                f" delete its keys, all that begin with {snapshot.keys.root}, or choose another --run-id"
            )
            return exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, reason))
    run = start_run(snapshot, agent.spec.terms, agent.me, member.lease)
    again_s = now_s + agent.times.lease_ttl_s
    agent = replace(agent.as_member(in_flight=Tag.RUN, run_again_s=again_s), lead_at_s=again_s)
    return agent, (Commit(run, Tag.RUN),)


def _join(agent: Agent, joining: Joining) -> Step:
    member, generation = agent.membership, agent.snapshot.generation
    assert generation
    agent = replace(agent.as_member(in_flight=Tag.JOIN), phase=replace(joining, joined=generation.number))
    return agent, (Join(member.lease, member.is_member, agent.progressed),)


def _refused(agent: Agent, now_s: float) -> Step:
    """A join was refused: the generation moved, the job ended, or this node was evicted."""
    agent, snapshot, phase = agent.as_member(refused=False), agent.snapshot, agent.phase
    if not isinstance(phase, Joining):
        return attend(agent, now_s)
    agent = replace(agent, phase=replace(phase, joined=-1))
    moved = snapshot.generation is None or snapshot.generation.number != phase.joined or snapshot.ended
    if moved or not agent.membership.is_member:
        return attend(agent, now_s)
    return _evicted(agent)


def _evicted(agent: Agent) -> Step:
    logged = Log("the others waited too long for this node, and it lost its seat; it rejoins as a new node", "warning")
    return agent.as_member(lease=0, is_member=False, evicted=False), (logged, Renew())


def _lead(agent: Agent, now_s: float) -> Step:
    snapshot, member = agent.snapshot, agent.membership
    if snapshot.ended or snapshot.generation is None:
        return agent, ()
    if not snapshot.leader:
        if member.outvoted:
            # There is no leader, yet this node could not become one: its member key is gone, or a leader came and went.
            standing = confirm_membership(snapshot, agent.me)
            return agent.as_member(in_flight=Tag.STANDING), (Commit(standing, Tag.STANDING),)
        election = become_leader(snapshot, agent.me, member.lease)
        return agent.as_member(in_flight=Tag.ELECT), (Commit(election, Tag.ELECT),)
    if member.outvoted:
        agent = agent.as_member(outvoted=False)
    if not agent.leads:
        forming = snapshot.current_table is None
        leader = f"its leader, on {host_of(snapshot.leader)}, logs what it waits for"
        text = f"generation {snapshot.generation.number}; {leader}" if forming else ""
        return _wait(agent, _waiting_for(agent.phase, text), now_s), ()
    if agent.reach.failing_since_s is not None:
        # A decision from an old snapshot would be written when the store is back.
        return agent, ()
    if not snapshot.whole:
        return (agent, ()) if member.widened else (agent.as_member(widened=True), (Widen(),))
    table_age_s = now_s - agent.table_seen[1]
    led = lead(snapshot, agent.leader_state, agent.times, now_s, table_age_s, agent.lossless_until_s)
    waiting = _waiting_for(agent.phase, led.waiting)
    agent = _wait(replace(agent, leader_state=led.leader_state, lead_at_s=led.wake_s), waiting, now_s)
    if led.txn is None:
        return agent, ()
    return agent.as_member(in_flight=Tag.LEAD), (Commit(led.txn, Tag.LEAD),)


def _waiting_for(phase: Phase, forming: str) -> str:
    """The wait to log; `forming` is what a generation that is being formed waits for.

    While the workers of this node stop, the others wait for this node, and `stopping` logs that.
    """
    match phase:
        case Joining():
            return forming
        case Finished(table=table) if len(table.seats) > 1:
            return "the workers of the other nodes; those of this node have all exited with 0"
    return ""


def _wait(agent: Agent, text: str, now_s: float) -> Agent:
    waiting = agent.waiting
    if text == waiting.text:
        return agent
    due_s = max(now_s + LOG_AFTER_S, waiting.logged_s + LOG_AGAIN_S) if text else None
    return replace(agent, waiting=Waiting(text, due_s, waiting.logged_s))


def _mismatch(agent: Agent, theirs: Terms | None) -> Outcome | None:
    """Why this node does not fit the job in the store: both values, and the way out."""
    ours = agent.spec.terms
    if theirs is None or theirs == ours:
        return None
    shown = [
        ("--nnodes", *(f"{terms.nodes_min}:{terms.nodes_max}" for terms in (theirs, ours))),
        ("--max-restarts", theirs.max_restarts, ours.max_restarts),
        ("--restart-window", theirs.restart_window_s, ours.restart_window_s),
        ("--exclude-after", theirs.exclude_after, ours.exclude_after),
        ("--no-restart-codes", *(",".join(map(str, terms.no_restart_codes)) or "none" for terms in (theirs, ours))),
    ]
    differences = [f"{name} {there} there, {here} here" for name, there, here in shown if there != here]
    if theirs.digest != ours.digest:
        differences.append(f"the command `{theirs.command}` there, `{ours.command}` here")
    if not differences:
        return None
    reason = (
        f"this node does not fit the running {job_name(agent.spec.run_id)}: {'; '.join(differences)};"
        " type the same on all nodes, or choose another --run-id"
    )
    return agent.outcome(OutcomeKind.REFUSED, reason)


def snapshot_changed(agent: Agent, joining: Joining, _event: events.SnapshotChanged, _now_s: float) -> Step:
    """Start workers if the newest table seats this node, else wait as a spare; exit if the job has ended."""
    if outcome := outcome_in_store(agent):
        return exit_with(agent, outcome)
    generation = agent.snapshot.generation
    if generation and joining.joined == generation.number > joining.ran and agent.membership.is_member:
        return _take_seat(agent, agent.snapshot.current_table, joining)
    return agent, ()


def store_lost(agent: Agent, _: Joining | Finished, event: events.StoreLost, _now_s: float) -> Step:
    """Exit: this node cannot learn how the job ends."""
    return exit_with(agent, agent.outcome(OutcomeKind.UNKNOWN, event.why))


def _take_seat(agent: Agent, table: RankTable | None, joining: Joining) -> Step:
    """Start this node's workers, if the newest generation has a table that seats it."""
    if table is None:
        return agent, ()
    group_rank = table.group_rank(agent.me.node_id)
    if group_rank is None:
        if joining.spare_of == table.generation:
            return agent, ()
        logged = Log(f"generation {table.generation} runs without this node: {_why_seatless(agent, table)}")
        return replace(agent, phase=replace(joining, spare_of=table.generation)), (logged,)
    running = Running(table, frozenset(range(table.seats[group_rank].slots)), is_first=joining.ran < 0)
    # `elaunch status` needs the name on other hosts only.
    has_name = running.is_first and agent.spec.nodes_max > 1 and agent.spec.run_id != UNNAMED
    name = f"; job {agent.spec.run_id}" if has_name else ""
    logs = f"; output in {agent.logs}" if running.is_first and agent.logs else ""
    sizes = role_sizes(table.seats)
    roles = f"{', '.join(f'{count} {name}' for name, count in sizes.items())}; " if len(sizes) > 1 else ""
    reason, _, cause = table.reason.partition(CAUSE)
    if agent.last_failure is None or cause.partition(")")[0] != agent.last_failure.sentence.partition(")")[0]:
        # Otherwise the failure is logged already, perhaps with a cause that was found later.
        reason = table.reason
    started = Log(f"generation {table.generation}: {table.size_text} ({roles}{reason}{name}){logs}")
    differ = (Log(table.mismatch, "warning"),) if table.mismatch not in ("", agent.mismatch) else ()
    agent = replace(agent, phase=running, mismatch=table.mismatch)
    return agent, (started, *differ, Spawn(table, group_rank))


def _why_seatless(agent: Agent, table: RankTable) -> str:
    if exclusion := exclusion_of(agent.me.node_id, table.excluded):
        return f"it is excluded (--exclude-after), since {exclusion.why}; waiting in case too few others are left"
    if table.vacant and not newcomers_of(table, [agent.me], agent.spec.nodes_max):
        roles = " or ".join(dict.fromkeys(table.vacant))
        return f"the free seats are for nodes with the role {roles}; waiting as a spare"
    if len(table.seats) < agent.spec.nodes_max:
        # It came while that table formed, or was partitioned: the running nodes admit it at their next step boundary.
        again = agent.spec.max_restarts > 0
        return "it came too late; " + ("waiting for the next" if again else "with max_restarts 0 there is no other")
    seats = "1 seat is" if len(table.seats) == 1 else f"{len(table.seats)} seats are"
    return f"its {seats} taken; waiting as a spare"


def leave(agent: Agent, _: Phase, event: Signalled, _now_s: float) -> Step:
    """Without workers: leave the job, or end it for all nodes (SIGINT), and exit."""
    agent, withdrawn, outcome = withdraw(agent, event)
    return exit_with(agent, outcome, withdrawn)


def withdraw(agent: Agent, event: Signalled) -> tuple[Agent, Actions, Outcome]:
    """Notify the others before workers stop: a person's signal ends the job; on any other only this node leaves."""
    where = f" by {agent.me.host}" if agent.spec.nodes_max > 1 else ""
    reason = "no process reads its stdout any more" if event.signum == SIGPIPE else f"{event.name} was received"
    outcome = agent.outcome(OutcomeKind.INTERRUPTED, f"{reason}{where}", signum=event.signum)
    snapshot, table = agent.snapshot, agent.snapshot.current_table
    if snapshot.generation is None or snapshot.ended:
        return agent, (), outcome
    if event.signum in ENDS_JOB and agent.membership.belongs:
        return agent, (Commit(transactions.end_job(snapshot, outcome)),), outcome
    is_seated = table is not None and table.group_rank(agent.me.node_id) is not None
    opens = is_seated and not isinstance(agent.phase, Finished)
    left = withdrawal(agent, opens=opens, why=outcome.reason, signum=event.signum)
    return agent.as_member(is_member=False), left, outcome


def end_of_own_run(agent: Agent, generation: int, event: Signalled) -> Step:
    """End the job for all nodes, unless the store may hold another job by now."""
    newest = agent.snapshot.generation
    if newest and newest.number > generation + 1:
        return agent, ()
    agent, withdrawn, _ = withdraw(agent, event)
    return agent, withdrawn


def withdrawal(agent: Agent, *, opens: bool, why: str, signum: int = 0) -> Actions:
    """Leave the job in the store; a leader also resigns, so that another can lead immediately."""
    snapshot = agent.snapshot
    left: Actions = (Commit(transactions.leave(snapshot, agent.me, opens=opens, why=why, signum=signum)),)
    return (*left, Commit(transactions.resign(snapshot))) if snapshot.leader == agent.me.node_id else left


@dataclass(frozen=True)
class OrderResponse:
    """Whether the order is carried out, and a sentence about it for the user who gave it."""

    is_done: bool
    text: str


def order(agent: Agent, topic: Topic) -> tuple[Signalled | RestartOrdered | None, OrderResponse]:
    """The event to take, if any, and the response."""
    snapshot, phase = agent.snapshot, agent.phase
    if ended := agent.ending or snapshot.ended:
        # A second SIGINT would kill workers that are saving.
        return None, OrderResponse(topic is Topic.STOP, f"the job is already ending: {ended.reason}")
    job = job_name(snapshot.keys.run_id)
    has_others = agent.spec.nodes_max > 1
    is_away = has_others and agent.reach.failing_since_s is not None
    if topic is Topic.STOP:
        where = " on all nodes" if has_others else ""
        where = " on this node; the store is unreachable, so stop the other nodes there" if is_away else where
        grace = f"workers have {agent.times.stop_grace_s:g} s to save; the job's exit code is {SHELL_BASE + SIGINT}"
        return Signalled(SIGINT, "elaunch stop", is_order=True), OrderResponse(True, f"{job} stops{where}: {grace}")
    if agent.spec.max_restarts == 0:
        why = "it has one generation, since it was started with --max-restarts 0; stop it and start it again"
        return None, OrderResponse(False, why)
    if is_away:
        return None, OrderResponse(False, "the job's store is unreachable, and without it no generation can be opened")
    opened, table = snapshot.generation, snapshot.current_table
    # A joining node is a spare or waits for its seat, while workers of other nodes run.
    if not isinstance(phase, (Joining, Running, Finished)) or opened is None or table is None:
        generation = f"generation {opened.number + bool(table)}" if opened else "the first generation"
        return None, OrderResponse(False, f"no workers run now: {generation} is about to start")
    number = opened.number + 1
    return RestartOrdered(), OrderResponse(True, f"{job}: all workers stop, and start again as generation {number}")


def restart(agent: Agent, _: Joining | Running | Finished, _event: RestartOrdered, _now_s: float) -> Step:
    """Open a new generation on all nodes; it is not counted against the budget."""
    if agent.snapshot.current_table is None:
        return agent, ()
    cause = f"elaunch restart was received by {agent.me.host}"
    return agent, (Commit(transactions.open_restart(agent.snapshot, cause)),)
