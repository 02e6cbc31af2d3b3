"""How the leader forms a generation: it waits for nodes, gives them ranks, or ends the job instead.

The rules and their numbers are those of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.rendezvous.endpoint import PREFIX
from elaunch.rendezvous.rules.assign_ranks import Seating, by_topology, in_order_of_seating, seat
from elaunch.rendezvous.rules.restart_policy import (
    NO_PROGRESS_MAX,
    GiveUp,
    alike,
    assess,
    decisive_failure,
    first_failure,
    is_excluded,
    judge,
)
from elaunch.rendezvous.rules.snapshot import Snapshot, seats_of
from elaunch.rendezvous.rules.transactions import (
    end_unformed,
    evict,
    first_names,
    hosts,
    loss_of,
    open_loss,
    seal_table,
)
from elaunch.rendezvous.store import Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import (
    Exclusion,
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

# In a table's reason, the sentence of a failure follows it.
CAUSE = "; the cause: "
# The most software versions that a mismatch names.
_SOFTWARE_KINDS_MAX = 3


@dataclass(frozen=True)
class Formation:
    """The progress of one forming generation, on the leader's own clock.

    `since_s`: when it first saw the generation. `gathered_s`: when all survivors had joined. `enough_s`: when there
    were enough nodes. None means not yet. No node is evicted before `patient_until_s`.
    """

    generation: int = -1
    since_s: float = 0.0
    gathered_s: float | None = None
    enough_s: float | None = None
    patient_until_s: float = 0.0

    def after_absence(self, away_s: float, patient_until_s: float) -> Formation:
        """Extend the deadlines: the leader was cut off from the store for `away_s`, perhaps as other nodes were."""
        return replace(self, since_s=self.since_s + away_s, patient_until_s=patient_until_s)


NO_FORMATION = Formation()


@dataclass(frozen=True)
class Formed:
    """The next transaction if one is due; else when to check again, and what the leader waits for."""

    formation: Formation
    txn: Txn | None = None
    wake_s: float | None = None
    waiting: str = ""


def form(
    snapshot: Snapshot, formation: Formation, times: Times, now_s: float, table_age_s: float, lossless_until_s: float
) -> Formed:
    """The leader's next step for a forming generation.

    `table_age_s` is the time since it first saw the newest table; it matters if the budget has a window. Before
    `lossless_until_s` it waits for every node that may return, as in `lead`.
    """
    terms, generation = snapshot.terms, snapshot.generation
    assert terms
    assert generation
    if formation.generation != generation.number:
        formation = Formation(generation.number, now_s)
    joined = {n: j for n, j in snapshot.joined.get(generation.number, {}).items() if n in snapshot.members}
    forming = _Forming(snapshot, terms, generation, times, now_s, snapshot.table, joined)
    if lost := forming.lost():
        if now_s < lossless_until_s and len(joined) < terms.nodes_max:
            return Formed(formation, wake_s=lossless_until_s, waiting=f"{hosts(lost)} to reconnect")
        if not generation.kind.is_urgent:
            # Other workers may be on their way to a step boundary; they would wait in a collective for the lost node.
            return Formed(formation, open_loss(snapshot, lost))
    if forming.missing():
        return forming.await_survivors(formation)
    if formation.gathered_s is None:
        formation = replace(formation, gathered_s=now_s)
    decision = forming.decide(table_age_s)
    if isinstance(decision, Outcome):
        return Formed(formation, end_unformed(snapshot, decision))
    return forming.seal_or_wait(formation, *decision)


def counted_restarts(terms: Terms, table: RankTable, age_s: float) -> int:
    """The number of restarts that count against the budget `age_s` seconds after `table` was sealed."""
    if terms.restart_window_s is None:
        return table.restarts
    return sum(restart_age_s + age_s < terms.restart_window_s for restart_age_s in table.restart_ages_s)


@dataclass(frozen=True)
class _Forming:
    """A forming generation as the leader sees it now: the last table `before`, and the members in `joined`."""

    snapshot: Snapshot
    terms: Terms
    generation: Generation
    times: Times
    now_s: float
    before: RankTable | None
    joined: Mapping[str, Joined]

    @property
    def survivors(self) -> list[str]:
        return [s.node_id for s in self.before.seats if s.node_id in self.snapshot.members] if self.before else []

    def lost(self) -> list[str]:
        """Nodes of the last table whose leases have ended, except those that left or are done."""
        if self.before is None:
            return []
        accounted = {*self.snapshot.members, *self.snapshot.done.get(self.before.generation, frozenset())}
        if self.generation.kind is OpenKind.LEAVE:
            accounted.add(self.generation.node_id)
        return [s.node_id for s in self.before.seats if s.node_id not in accounted]

    def missing(self) -> list[str]:
        return [node_id for node_id in self.survivors if node_id not in self.joined]

    def await_survivors(self, formation: Formation) -> Formed:
        """Rules 1 and 8: no rank runs again before every survivor has stopped its old workers."""
        missing = self.missing()
        due_s = max(formation.since_s + self.times.form_deadline_s, formation.patient_until_s)
        if self.now_s < due_s or not self.joined:
            # No deadline while no node has joined: the workers may block on output that is not read yet.
            their = "its" if len(missing) == 1 else "their"
            wake_s = due_s if self.joined else None
            return Formed(formation, wake_s=wake_s, waiting=f"{hosts(missing)} to stop {their} workers")
        # This node neither stops nor leaves: some process of it survives every signal.
        return Formed(formation, evict(self.snapshot, missing[0]))

    def decide(self, table_age_s: float) -> tuple[RankTable, Exclusion | None] | Outcome:
        """Rules 3, 4 and 9: whether the job continues, and whether the restart is charged to its budget.

        If it continues: the next table, still without seats, and the node that is excluded from now on.
        """
        snapshot, terms, before = self.snapshot, self.terms, self.before
        draft = RankTable(self.generation.number, (), "", 0, self.generation.cause)
        if before is None:
            return draft, None
        failures = snapshot.failures.get(before.generation, ())
        now_progressed = any(f.progressed for f in failures) or any(j.progressed for j in self.joined.values())
        progressed = before.progressed or now_progressed
        no_progress = 0 if now_progressed else before.barren + 1
        # When a node is lost, its peers fail immediately and its lease ends later: the loss caused their failures.
        gone = [s.node_id for s in before.seats if s.node_id not in snapshot.members]
        # A join or a leave, which opens a generation too, ends the ranks of some nodes first: their peers fail.
        was_stopping = self.generation.number > before.generation + 1
        lost_only = was_stopping and bool(failures) and all(f.kind is FailureKind.PEER_LOST for f in failures)
        is_counted = self.generation.kind is OpenKind.FAIL and not gone and not lost_only
        spent = counted_restarts(terms, before, table_age_s) if is_counted else None
        reason = loss_of(gone) if gone and self.generation.kind is OpenKind.FAIL else self.generation.cause
        blame = assess(terms, before, failures if is_counted else (), snapshot.members, table_age_s)
        if failures:
            # Members, since spares may join a moment late. Without enough others the same node would run again.
            others = [snapshot.members[node_id] for node_id in blame.seatable(snapshot.members)]
            has_others = seat(before, others, terms.nodes_max).is_enough(terms.nodes_min)
            decision = judge(
                terms,
                snapshot.failures,
                before.generation,
                spent,
                no_progress,
                progressed,
                is_elsewhere=has_others and bool(blame.fresh or blame.on_trial),
                world_size=before.world_size,
            )
            if isinstance(decision, GiveUp):
                last = decisive_failure(failures, terms.no_restart_codes)
                return self._failed(before, decision.reason, last, decision.code)
            if is_counted:
                reason = decision.reason + _cause_suffix(self.generation, decisive_failure(failures))
        if terms.max_restarts == 0:
            return self._failed(before, f"{reason}, and max_restarts is 0, so that ends the job", None)
        if no_progress >= NO_PROGRESS_MAX:
            return self._failed(before, f"{no_progress} generations in a row made no progress; {reason}", None)
        ages_s = tuple(age_s + table_age_s for age_s in before.restart_ages_s)
        if terms.restart_window_s is not None:
            ages_s = tuple(age_s for age_s in (*ages_s, *([0.0] * is_counted)) if age_s < terms.restart_window_s)
        draft = replace(
            draft,
            reason=reason,
            restarts=before.restarts + is_counted,
            restart_ages_s=ages_s,
            barren=no_progress,
            progressed=progressed,
            streak=blame.streak,
            excluded=blame.excluded,
        )
        return draft, blame.fresh

    def _failed(self, before: RankTable, reason: str, failure: Failure | None, code: int = 1) -> Outcome:
        first = first_failure(self.snapshot.failures)
        # A lost node ends the job without a failure record. Its peers record that they lost it, which is no cause.
        if first and (alike(first, failure) if failure else first.kind is FailureKind.PEER_LOST):
            first = None
        restarts = before.restarts, self.terms.max_restarts
        return Outcome(OutcomeKind.FAILED, reason, before.generation, *restarts, failure, first=first, code=code)

    def seal_or_wait(self, formation: Formation, draft: RankTable, fresh: Exclusion | None) -> Formed:
        """Rules 2, 5, 6, 7 and 10: wait for nodes, or seal the table."""
        nodes_max, excluded = self.terms.nodes_max, draft.excluded
        seated = {*self.survivors}
        everyone = [self.snapshot.members[n] for n in (*self.survivors, *(n for n in self.joined if n not in seated))]
        welcome = [node for node in everyone if not is_excluded(node.node_id, excluded)]
        seating = seat(self.before, welcome, nodes_max)
        if waiting := self._await_ready(formation, seating, excluded):
            return waiting
        if welcome != everyone and not seating.is_enough(self.terms.nodes_min):
            # Too few others: a node that may fail again is better than none.
            welcome, seating = everyone, seat(self.before, everyone, nodes_max)
            last_resort = hosts([node_id for node_id in self.joined if is_excluded(node_id, excluded)])
            why = f"; {last_resort} would be excluded (--exclude-after), but too few other nodes are here"
            draft = replace(draft, reason=draft.reason + why)
        elif fresh:
            draft = replace(draft, reason=f"{draft.reason}; {fresh.who} is excluded: {fresh.why}")
        if not seating.is_enough(self.terms.nodes_min):
            return self._await_nodes(formation, seating)
        if formation.enough_s is None:
            formation = replace(formation, enough_s=self.now_s)
        here = len(seating.nodes)
        most = min(self.times.nodes_expected or nodes_max, nodes_max)
        due_s = (formation.enough_s or self.now_s) + self.times.last_call_s
        if self.before is None and here < most and self.now_s < due_s:
            waiting_for = f"more nodes, {self.times.last_call_s:g} s: {here} of at most {most} are here"
            return Formed(formation, wake_s=due_s, waiting=waiting_for)
        # Newcomers are sorted only once, since that takes long for thousands.
        seating = seat(self.before, in_order_of_seating(welcome, self.before), nodes_max)
        nodes = by_topology(seating.nodes)
        first, joined = nodes[0], self.joined[nodes[0].node_id]
        table = replace(
            draft,
            seats=seats_of([(node.node_id, node.slots, node.role) for node in nodes]),
            master_addr=first.address,
            master_port=joined.port,
            mismatch=_other_software(nodes, self.joined),
            vacant=seating.vacant,
            secret=joined.secret,
        )
        return Formed(formation, seal_table(self.snapshot, table))

    def _await_ready(self, formation: Formation, seating: Seating, excluded: Sequence[Exclusion]) -> Formed | None:
        """Rule 2: with free seats, wait for nodes that were ready a generation ago: they will be ready again soon."""
        if self.before is None or not (seating.free or seating.vacant) or formation.gathered_s is None:
            return None
        due_s = formation.gathered_s + self.times.spare_wait_s
        members = self.snapshot.members
        late = [
            node_id
            for generation in range(self.before.generation, formation.generation)
            for node_id in self.snapshot.joined.get(generation, {})
            if node_id in members and node_id not in self.joined and not is_excluded(node_id, excluded)
            if seating.has_seat_for(members[node_id])
        ]
        if not late or self.now_s >= due_s:
            return None
        return Formed(formation, wake_s=due_s, waiting=f"the spare {hosts(late)}")

    def _await_nodes(self, formation: Formation, seating: Seating) -> Formed:
        terms, timeout_s, here = self.terms, self.times.join_timeout_s, len(seating.nodes)
        # From `gathered_s`, since survivors may need longer to stop their workers than a new node needs to join.
        due_s = max(formation.since_s, formation.gathered_s or 0.0) + timeout_s
        # Nodes of this job with different prefixes cannot see each other, so the line names the prefix.
        prefix = self.snapshot.keys.prefix
        where = "" if prefix == PREFIX else f" under etcd_prefix={prefix}"
        needed = f"{terms.nodes_min}" if terms.nodes_min == terms.nodes_max else f"at least {terms.nodes_min}"
        what = f"nodes: {here} of {needed} {'is' if here == 1 else 'are'} here{where}"
        way_out = "start elaunch on the others, lower --nnodes"
        if roles := () if seating.is_plain else seating.lacking or seating.vacant:
            what = f"a node with the role {' or '.join(dict.fromkeys(roles))}; {what}"
            way_out = "start a node with that role"
        cause = self.generation.cause if self.generation.kind is OpenKind.LEAVE else ""
        if gone := self.lost():
            cause = loss_of(gone)
        why = cause and f"; {cause}"
        if self.now_s < due_s:
            return Formed(formation, wake_s=due_s, waiting=f"{what} (gives up after {timeout_s:g} s){why}")
        outcome = Outcome(
            OutcomeKind.FAILED,
            f"after {timeout_s:g} s the job still waits for {what}{why}; {way_out}, or raise"
            " --rdzv-conf join_timeout=SECONDS",
            self.generation.number,
            self.before.restarts if self.before else 0,
            terms.max_restarts,
        )
        return Formed(formation, end_unformed(self.snapshot, outcome))


def _cause_suffix(generation: Generation, cause: Failure) -> str:
    """The suffix for the cause; empty if that failure opened the generation, since every node has logged it already."""
    # After it reported a lost peer, that node may have found that another of its ranks was the cause.
    is_of_opener = not generation.is_secondary or generation.cause.startswith(cause.sentence.partition(")")[0])
    return "" if cause.node_id == generation.node_id and is_of_opener else f"{CAUSE}{cause.sentence}"


def _other_software(nodes: Sequence[Node], joined: Mapping[str, Joined]) -> str:
    """A sentence if the nodes have different software, so that their ranks may be incompatible; else empty."""
    hosts_of: dict[str, list[str]] = {}
    for node in nodes:
        # Unknown software counts as no difference.
        if software := joined[node.node_id].software:
            hosts_of.setdefault(software, []).append(node.host)
    if len(hosts_of) < 2:
        return ""
    # The most common software comes first.
    kinds = sorted(hosts_of, key=lambda kind: (-len(hosts_of[kind]), kind))
    parts = [f"{kind} on {first_names([*dict.fromkeys(hosts_of[kind])])}" for kind in kinds[:_SOFTWARE_KINDS_MAX]]
    more = "; and others" if len(kinds) > _SOFTWARE_KINDS_MAX else ""
    return f"the nodes have different software: {'; '.join(parts)}{more}"
