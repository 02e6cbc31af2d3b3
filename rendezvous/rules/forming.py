"""How the leader forms a generation: it waits for nodes, gives them ranks, or ends the job instead.

The rules and their numbers are those of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.rendezvous.endpoint import PREFIX
from elaunch.rendezvous.rules.excluding import Suspicion, is_excluded, stand
from elaunch.rendezvous.rules.seating import Seating, in_order_of_rank, seat
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.software import mismatch_of
from elaunch.rendezvous.rules.table_codec import seats_of
from elaunch.rendezvous.rules.transactions import end_unformed, evict, hosts, loss_of, open_loss, seal_table
from elaunch.rendezvous.rules.verdict import (
    BARREN_MAX,
    GiveUp,
    alike,
    decisive_failure,
    first_failure,
    judge,
    killed_together,
)
from elaunch.rendezvous.store import Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    Terms,
)


@dataclass(frozen=True)
class Formation:
    """When the leader saw what of one forming generation, on its own clock.

    `since_s`: it saw the generation first. `gathered_s`: all survivors had joined. `enough_s`: there were enough nodes.
    None means not yet. No node is evicted before `patient_until_s`.
    """

    generation: int = -1
    since_s: float = 0.0
    gathered_s: float | None = None
    enough_s: float | None = None
    patient_until_s: float = 0.0

    def after_absence(self, away_s: float, patient_until_s: float) -> Formation:
        """The leader was cut off from the store for `away_s`. The other nodes may have been too, so none could join."""
        return replace(self, since_s=self.since_s + away_s, patient_until_s=patient_until_s)


NO_FORMATION = Formation()
# In a table's reason: what comes after it is the sentence of a failure.
CAUSE = "; the cause: "


@dataclass(frozen=True)
class Formed:
    """The next transaction if it is time for one; else when to look again, and what the leader waits for."""

    formation: Formation
    txn: Txn | None = None
    wake_s: float | None = None
    waiting: str = ""


def form(
    snapshot: Snapshot,
    terms: Terms,
    generation: Generation,
    formation: Formation,
    times: Times,
    now_s: float,
    table_age_s: float,
    lossless_until_s: float,
) -> Formed:
    """What the leader of a forming generation does next.

    `table_age_s` is the time since it first saw the newest table; it matters if the budget has a window. Before
    `lossless_until_s` it waits for every node that may come back, as in `lead`.
    """
    if formation.generation != generation.number:
        formation = Formation(generation.number, now_s)
    before = snapshot.table
    joined = {n: j for n, j in snapshot.joined.get(generation.number, {}).items() if n in snapshot.members}
    survivors = [s.node_id for s in before.seats if s.node_id in snapshot.members] if before else []
    if lost := _lost_since(snapshot, before, generation) if before else []:
        if now_s < lossless_until_s and len(joined) < terms.nodes_max:
            return Formed(formation, wake_s=lossless_until_s, waiting=f"{hosts(lost)} to come back")
        if not generation.kind.is_urgent:
            # Other workers may be on their way to a step boundary; they would wait in a collective for the lost node.
            return Formed(formation, open_loss(snapshot, lost))
    if missing := [node_id for node_id in survivors if node_id not in joined]:
        return _await_survivors(snapshot, formation, times, now_s, missing, is_awaited=bool(joined))
    if formation.gathered_s is None:
        formation = replace(formation, gathered_s=now_s)
    decision = _decide(snapshot, terms, generation, before, joined, table_age_s)
    if isinstance(decision, Outcome):
        return Formed(formation, end_unformed(snapshot, decision))
    seated = {*survivors}
    everyone = [snapshot.members[n] for n in (*survivors, *(n for n in joined if n not in seated))]
    welcome = [node for node in everyone if not is_excluded(node.node_id, decision.blame.excluded)]
    seating = seat(before, welcome, terms.nodes_max)
    if waiting := _await_ready(snapshot, before, seating, joined, formation, times, now_s, decision.blame):
        return waiting
    if welcome != everyone and not seating.is_enough(terms.nodes_min):
        # Too few others: a node that may fail again is better than none.
        welcome, seating = everyone, seat(before, everyone, terms.nodes_max)
        decision = replace(decision, reason=decision.reason + _last_resort(decision, joined))
    elif fresh := decision.blame.fresh:
        decision = replace(decision, reason=f"{decision.reason}; {fresh.who} is excluded: {fresh.why}")
    return _seal_or_wait(snapshot, terms, generation, decision, welcome, seating, joined, formation, times, now_s)


def _lost_since(snapshot: Snapshot, before: RankTable, generation: Generation) -> list[str]:
    """Nodes of the last table whose lease has ended, without those that left or were done."""
    done = snapshot.done.get(before.generation, frozenset())
    gone = (s.node_id for s in before.seats if s.node_id not in snapshot.members and s.node_id not in done)
    left = generation.node_id if generation.kind is OpenKind.LEAVE else ""
    return [node_id for node_id in gone if node_id != left]


def counted_restarts(terms: Terms, table: RankTable, age_s: float) -> int:
    """How many restarts count against the budget `age_s` seconds after `table` was sealed."""
    if terms.restart_window_s is None:
        return table.restarts
    return sum(restart_age_s + age_s < terms.restart_window_s for restart_age_s in table.restart_ages_s)


_NO_SUSPICION = Suspicion(None, ())


@dataclass(frozen=True)
class _GoOn:
    """The job goes on. The fields are what the next table takes over from the last one."""

    reason: str
    restarts: int = 0
    restart_ages_s: tuple[float, ...] = ()
    barren: int = 0
    progressed: bool = False
    blame: Suspicion = _NO_SUSPICION


def _last_resort(decision: _GoOn, joined: Mapping[str, Joined]) -> str:
    """Words for the reason of a table that seats an excluded node."""
    seated = [node_id for node_id in joined if is_excluded(node_id, decision.blame.excluded)]
    return f"; {hosts(seated)} would be excluded (--exclude-after), but too few other nodes are here"


def _await_survivors(
    snapshot: Snapshot,
    formation: Formation,
    times: Times,
    now_s: float,
    missing: list[str],
    *,
    is_awaited: bool,
) -> Formed:
    """Rules 1 and 8: no rank runs again before every survivor has stopped its old workers."""
    due_s = max(formation.since_s + times.form_deadline_s, formation.patient_until_s)
    if now_s < due_s or not is_awaited:
        # If no other node waits, there is no deadline: its workers may block on output that nobody reads yet.
        their = "its" if len(missing) == 1 else "their"
        wake_s = due_s if is_awaited else None
        return Formed(formation, wake_s=wake_s, waiting=f"{hosts(missing)} to stop {their} workers")
    # This node neither stops nor leaves: some process of it survives every signal.
    return Formed(formation, evict(snapshot, missing[0]))


def _decide(
    snapshot: Snapshot,
    terms: Terms,
    generation: Generation,
    before: RankTable | None,
    joined: Mapping[str, Joined],
    table_age_s: float,
) -> _GoOn | Outcome:
    """Rules 3, 4 and 9: whether the job goes on, and whether the restart is charged to its budget."""
    if before is None:
        return _GoOn(generation.cause)
    failures = snapshot.failures.get(before.generation, ())
    now_progressed = any(f.progressed for f in failures) or any(j.progressed for j in joined.values())
    progressed = before.progressed or now_progressed
    barren = 0 if now_progressed else before.barren + 1
    # When a node is lost, its peers fail at once and its lease ends later: the loss caused their failures.
    gone = [s.node_id for s in before.seats if s.node_id not in snapshot.members]
    is_counted = generation.kind is OpenKind.FAIL and not gone
    spent = counted_restarts(terms, before, table_age_s) if is_counted else None
    reason = loss_of(gone) if gone and generation.kind is OpenKind.FAIL else generation.cause
    blame = stand(terms, before, failures if is_counted else (), snapshot.members, table_age_s)
    if failures:
        # Spares that are late by a moment are members, too. Without enough of them the same node would run again.
        others = [snapshot.members[node_id] for node_id in blame.seatable(snapshot.members)]
        has_others = seat(before, others, terms.nodes_max).is_enough(terms.nodes_min)
        is_elsewhere = has_others and bool(blame.fresh or blame.on_trial)
        decision = judge(
            terms,
            snapshot.failures,
            before.generation,
            spent,
            barren,
            progressed,
            is_elsewhere=is_elsewhere,
            world_size=before.world_size,
        )
        if isinstance(decision, GiveUp):
            failure = killed_together(decisive_failure(failures), failures)
            return _failed(snapshot, before, terms, decision.reason, failure)
        if is_counted:
            reason = decision.reason + _said_of_cause(generation, decisive_failure(failures))
    if terms.max_restarts == 0:
        return _failed(snapshot, before, terms, f"{reason}, and max_restarts is 0, so that ends the job", None)
    if barren >= BARREN_MAX:
        return _failed(snapshot, before, terms, f"{barren} generations in a row made no progress; {reason}", None)
    ages_s = tuple(age_s + table_age_s for age_s in before.restart_ages_s)
    if terms.restart_window_s is not None:
        ages_s = tuple(age_s for age_s in (*ages_s, *([0.0] * is_counted)) if age_s < terms.restart_window_s)
    return _GoOn(reason, before.restarts + is_counted, ages_s, barren, progressed, blame)


def _said_of_cause(generation: Generation, cause: Failure) -> str:
    """The cause in words if it is not the failure that opened the generation, which every node has told already."""
    # The same node may have found after a lost peer which other of its ranks was the cause.
    is_of_opener = not generation.is_secondary or generation.cause.startswith(cause.sentence.partition(")")[0])
    return "" if cause.node_id == generation.node_id and is_of_opener else f"{CAUSE}{cause.sentence}"


def _failed(snapshot: Snapshot, before: RankTable, terms: Terms, reason: str, failure: Failure | None) -> Outcome:
    first = first_failure(snapshot.failures)
    # A lost node ends the job without a failure. Its peers have lost it, which is no cause.
    if first and (alike(first, failure) if failure else first.kind is FailureKind.PEER_LOST):
        first = None
    return Outcome(
        OutcomeKind.FAILED, reason, before.generation, before.restarts, terms.max_restarts, failure, first=first
    )


def _await_ready(
    snapshot: Snapshot,
    before: RankTable | None,
    seating: Seating,
    joined: Mapping[str, Joined],
    formation: Formation,
    times: Times,
    now_s: float,
    blame: Suspicion,
) -> Formed | None:
    """Rule 2: with free seats, wait for nodes that were ready a generation ago: they will be ready again soon."""
    if before is None or not (seating.room or seating.vacant) or formation.gathered_s is None:
        return None
    due_s = formation.gathered_s + times.spare_wait_s
    late = [
        node_id
        for generation in range(before.generation, formation.generation)
        for node_id in snapshot.joined.get(generation, {})
        if node_id in snapshot.members and node_id not in joined and not is_excluded(node_id, blame.excluded)
        if seating.has_seat_for(snapshot.members[node_id])
    ]
    return Formed(formation, wake_s=due_s, waiting=f"the spare {hosts(late)}") if late and now_s < due_s else None


def _seal_or_wait(
    snapshot: Snapshot,
    terms: Terms,
    generation: Generation,
    decision: _GoOn,
    welcome: list[Node],
    seating: Seating,
    joined: Mapping[str, Joined],
    formation: Formation,
    times: Times,
    now_s: float,
) -> Formed:
    """Rules 5, 6, 7 and 10. `seating` is that of those who are `welcome`, in any order."""
    if not seating.is_enough(terms.nodes_min):
        return _await_nodes(snapshot, terms, generation, formation, times, now_s, seating)
    if formation.enough_s is None:
        formation = replace(formation, enough_s=now_s)
    before, here = snapshot.table, len(seating.nodes)
    most = min(times.nodes_expected or terms.nodes_max, terms.nodes_max)
    due_s = (formation.enough_s or now_s) + times.last_call_s
    if before is None and here < most and now_s < due_s:
        waiting = f"more nodes, {times.last_call_s:g} s: {here} of at most {most} are here"
        return Formed(formation, wake_s=due_s, waiting=waiting)
    # Newcomers are put in order once, since that takes long for thousands.
    seating = seat(before, in_order_of_rank(welcome, before), terms.nodes_max)
    return Formed(formation, seal_table(snapshot, _table(generation, decision, seating, joined)))


def _await_nodes(
    snapshot: Snapshot,
    terms: Terms,
    generation: Generation,
    formation: Formation,
    times: Times,
    now_s: float,
    seating: Seating,
) -> Formed:
    # Not from the generation's opening: survivors may need longer to stop their workers than a new node has to come.
    due_s = max(formation.since_s, formation.gathered_s or 0.0) + times.join_timeout_s
    here = len(seating.nodes)
    # Nodes of this job with different prefixes cannot see each other, so the line names the prefix.
    prefix = snapshot.keys.prefix
    where = "" if prefix == PREFIX else f" under etcd_prefix={prefix}"
    roles = () if seating.is_plain else seating.lacking or seating.vacant
    gone = _lost_since(snapshot, snapshot.table, generation) if snapshot.table else []
    cause = loss_of(gone) if gone else generation.cause if generation.kind is OpenKind.LEAVE else ""
    why = cause and f"; {cause}"
    if now_s < due_s:
        needed = f"{terms.nodes_min}" if terms.nodes_min == terms.nodes_max else f"at least {terms.nodes_min}"
        are = "is" if here == 1 else "are"
        what = f"nodes: {here} of {needed} {are} here{where}"
        if roles:
            others = ", which no other node has" if seating.lacking else f"; {what}"
            what = f"a node with the role {_or(roles)}{others}"
        waiting = f"{what} (gives up after {times.join_timeout_s:g} s){why}"
        return Formed(formation, wake_s=due_s, waiting=waiting)
    table = snapshot.table
    found = f"{here} of {terms.nodes_min} nodes were here{where} after {times.join_timeout_s:g} s"
    way_out = "start elaunch on the others, lower --nnodes"
    if roles:
        was = "1 node was" if here == 1 else f"{here} nodes were"
        found = (
            f"no node with the role {_or(roles)} came in {times.join_timeout_s:g} s for a free seat ({was} here{where})"
        )
        way_out = "start a node with that role" + ("" if seating.lacking else ", lower --nnodes")
    outcome = Outcome(
        OutcomeKind.FAILED,
        f"{found}{why}; {way_out}, or raise --rdzv-conf join_timeout=SECONDS",
        generation.number,
        table.restarts if table else 0,
        terms.max_restarts,
    )
    return Formed(formation, end_unformed(snapshot, outcome))


def _or(roles: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(roles))


def _table(generation: Generation, decision: _GoOn, seating: Seating, joined: Mapping[str, Joined]) -> RankTable:
    nodes = seating.nodes
    first = nodes[0]
    return RankTable(
        generation=generation.number,
        seats=seats_of([(node.node_id, node.slots, node.role) for node in nodes]),
        master_addr=first.address,
        master_port=joined[first.node_id].port,
        reason=decision.reason,
        restarts=decision.restarts,
        restart_ages_s=decision.restart_ages_s,
        barren=decision.barren,
        progressed=decision.progressed,
        streak=decision.blame.streak,
        excluded=decision.blame.excluded,
        mismatch=_mismatch(nodes, joined),
        vacant=seating.vacant,
        # A node without one is of an older elaunch, whose ranks would not know it.
        secret=joined[first.node_id].secret if all(joined[node.node_id].secret for node in nodes) else "",
    )


def _mismatch(nodes: Sequence[Node], joined: Mapping[str, Joined]) -> str:
    found = [(node.host, joined[node.node_id].software) for node in nodes]
    # What is unknown differs from nothing.
    if len({software for _, software in found if software}) < 2:
        return ""
    return mismatch_of(found)
