"""The leader's rules: when a generation is sealed, with which ranks, and when the job has ended."""

from __future__ import annotations

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.snapshot import Snapshot
from elaunch.rendezvous.store import Absent, Txn
from elaunch.rendezvous.types import Generation, JobSpec, Joined, Node, OpenKind, Outcome, OutcomeKind, RankTable, Seat
from elaunch.rendezvous.verdict import GiveUp, judge, verdict

# Generations whose failure records are kept, besides the first.
FAILURES_KEPT = 20


def open_job(snapshot: Snapshot, spec: JobSpec, me: Node) -> Txn:
    """The first agent's transaction: the spec, itself as member and leader, and generation 0."""
    keys = snapshot.keys
    return Txn(
        (Absent(keys.spec), Absent(keys.generation), snapshot.live_guard),
        {
            keys.spec: encode(spec),
            keys.member(me.node_id): encode(me),
            keys.leader: me.node_id,
            keys.generation: encode(Generation(0, OpenKind.START, "the job starts")),
        },
    )


def join(snapshot: Snapshot, joined: Joined) -> Txn:
    """A node's word that it can run the newest generation."""
    assert snapshot.generation
    key = snapshot.keys.joined(snapshot.generation.number, joined.node_id)
    return Txn((snapshot.gen_guard, snapshot.live_guard), {key: encode(joined)})


def lead(snapshot: Snapshot, me: Node, restart_times_s: tuple[float, ...], now_s: float) -> Txn | None:
    """What the leader writes next: a table, the end, or nothing.

    `restart_times_s` are the times of the restarts that this leader has counted, on its own monotonic clock; they
    matter only where the budget has a window.
    """
    if snapshot.leader != me.node_id or snapshot.ended or snapshot.generation is None or snapshot.spec is None:
        return None
    generation, table = snapshot.generation, snapshot.table
    if table and table.generation == generation.number:
        done = snapshot.done.get(table.generation, frozenset())
        return _end_in_success(snapshot, table) if all(seat.node_id in done for seat in table.seats) else None
    return _form(snapshot, snapshot.spec, generation, restart_times_s, now_s)


def counted_restarts(spec: JobSpec, table: RankTable | None, restart_times_s: tuple[float, ...], now_s: float) -> int:
    """How many restarts the budget holds against the job now."""
    if spec.restart_window_s is None:
        return table.restarts if table else 0
    return sum(now_s - at_s < spec.restart_window_s for at_s in restart_times_s)


def _form(
    snapshot: Snapshot, spec: JobSpec, generation: Generation, restart_times_s: tuple[float, ...], now_s: float
) -> Txn | None:
    before = snapshot.table
    joined = {j.node_id: j for j in snapshot.joined.get(generation.number, ())}
    survivors = [seat.node_id for seat in before.seats if seat.node_id in snapshot.members] if before else []
    if not all(node_id in joined for node_id in survivors):
        return None
    reason, restarts, barren, progressed = generation.cause, before.restarts if before else 0, 0, False
    if before:
        failures = snapshot.failures.get(before.generation, ())
        now_progressed = any(f.progressed for f in failures)
        progressed = before.progressed or now_progressed
        barren = 0 if now_progressed else before.barren + 1
        spent = counted_restarts(spec, before, restart_times_s, now_s)
        decision = judge(spec, snapshot.failures, before.generation, spent, barren, progressed)
        if isinstance(decision, GiveUp):
            return _end_in_failure(snapshot, spec, before, decision)
        reason, restarts = decision.reason, restarts + 1
    newcomers = sorted(node_id for node_id in joined if node_id not in survivors and node_id in snapshot.members)
    nodes = [snapshot.members[node_id] for node_id in (*survivors, *newcomers)][: spec.nodes_max]
    if len(nodes) < spec.nodes_min:
        return None
    first = nodes[0]
    table = RankTable(
        generation.number,
        _seats(nodes),
        first.address,
        joined[first.node_id].port,
        reason,
        restarts,
        barren,
        progressed,
    )
    keys = snapshot.keys
    guards = (snapshot.gen_guard, snapshot.live_guard, Absent(keys.table(generation.number)))
    return Txn(guards, {keys.table(generation.number): encode(table)}, _outdated(snapshot, generation.number))


def _outdated(snapshot: Snapshot, sealed: int) -> tuple[str, ...]:
    """The keys that nobody needs once generation `sealed` has its table."""
    keys = snapshot.keys
    tables = (keys.table(g) for g in snapshot.tables if g < sealed)
    joins = (keys.joined(g, j.node_id) for g, joined in snapshot.joined.items() if g < sealed for j in joined)
    done = (keys.done(g, node_id) for g, nodes in snapshot.done.items() for node_id in nodes)
    # The first failure ever says how it began, the last ones what it came to.
    pruned = sorted(g for g in snapshot.failures if g > 0)[:-FAILURES_KEPT]
    failures = (keys.failure(g, f.node_id) for g in pruned for f in snapshot.failures[g])
    return (*tables, *joins, *done, *failures)


def _seats(nodes: list[Node]) -> tuple[Seat, ...]:
    seats: list[Seat] = []
    for node in nodes:
        first_rank = seats[-1].first_rank + seats[-1].slots if seats else 0
        seats.append(Seat(node.node_id, node.host, node.slots, first_rank))
    return tuple(seats)


def _end_in_success(snapshot: Snapshot, table: RankTable) -> Txn:
    outcome = Outcome(
        OutcomeKind.SUCCEEDED,
        "every worker exited with 0",
        table.generation,
        table.restarts,
        snapshot.spec.max_restarts if snapshot.spec else 0,
    )
    return Txn((snapshot.gen_guard, snapshot.live_guard), {snapshot.keys.ended: encode(outcome)})


def _end_in_failure(snapshot: Snapshot, spec: JobSpec, table: RankTable, decision: GiveUp) -> Txn:
    outcome = Outcome(
        OutcomeKind.FAILED,
        decision.reason,
        table.generation,
        table.restarts,
        spec.max_restarts,
        verdict(snapshot.failures[table.generation]),
    )
    return Txn((snapshot.gen_guard, snapshot.live_guard), {snapshot.keys.ended: encode(outcome)})
