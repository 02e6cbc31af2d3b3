"""The leader's rules while a generation runs: success, lost nodes, hangs, late joiners; and its state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaunch.rendezvous.rules.assign_ranks import newcomers_of
from elaunch.rendezvous.rules.form_generation import NO_FORMATION, Formation, form
from elaunch.rendezvous.rules.hang_verdict import confirm_s, declare_hang, end_hang, verdict_on
from elaunch.rendezvous.rules.restart_policy import is_excluded
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.transactions import open_failed, open_join, open_loss, repair, succeed
from elaunch.rendezvous.store import Delete, Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import RankTable


@dataclass(frozen=True)
class LeaderState:
    """A leader's state between two calls of `lead`, on its own monotonic clock.

    `formation` belongs to the generation that is forming. Nodes without a seat have been ready since `ready_since_s`.
    The last generation for such nodes was opened at `joined_at_s`; the next may be opened `join_interval_s` later.
    All nodes have reported since `hang_since_s` that their ranks are idle. `repaired` is the last transaction that was
    to replace an unreadable record.
    """

    formation: Formation = NO_FORMATION
    ready_since_s: float | None = None
    joined_at_s: float | None = None
    join_interval_s: float = 0.0
    hang_since_s: float | None = None
    repaired: Txn | None = None


@dataclass(frozen=True)
class Lead:
    """A leader's next transaction, when it checks again even if nothing changes, and what it waits for."""

    leader_state: LeaderState
    txn: Txn | None = None
    wake_s: float | None = None
    waiting: str = ""


def lead(
    snapshot: Snapshot,
    leader_state: LeaderState,
    times: Times,
    now_s: float,
    table_age_s: float,
    lossless_until_s: float,
) -> Lead:
    """Decide what the leader does next. The caller must be the leader, and its snapshot complete.

    `table_age_s` is the time since it first saw the newest table. Before `lossless_until_s` it declares no node lost: a
    leader that was partitioned itself cannot determine which nodes were partitioned too.
    """
    if snapshot.ended or snapshot.generation is None or snapshot.terms is None:
        return Lead(leader_state)
    if snapshot.repairs and (repaired := _repair(snapshot, leader_state)):
        return repaired
    table = snapshot.current_table
    if table is None:
        formed = form(snapshot, leader_state.formation, times, now_s, table_age_s, lossless_until_s)
        leader_state = replace(leader_state, formation=formed.formation, ready_since_s=None, hang_since_s=None)
        return Lead(leader_state, formed.txn, formed.wake_s, formed.waiting)
    done = snapshot.done.get(table.generation, frozenset())
    if all(seat.node_id in done for seat in table.seats):
        return Lead(leader_state, succeed(snapshot, snapshot.terms, table))
    if failures := snapshot.failures.get(table.generation):
        return Lead(leader_state, open_failed(snapshot, failures[0]))
    lost = _lost(snapshot, table, done)
    if lost:
        if now_s < lossless_until_s:
            return Lead(leader_state, wake_s=lossless_until_s)
        return Lead(leader_state, open_loss(snapshot, lost))
    hang = _watch_for_hang(snapshot, table, done, leader_state, times, now_s)
    if hang.txn:
        return hang
    led = _admit(snapshot, table, done, hang.leader_state, times, now_s)
    if led.txn:
        return led
    wakes_s = (hang.wake_s, led.wake_s)
    return replace(led, wake_s=min((at_s for at_s in wakes_s if at_s is not None), default=None))


def _repair(snapshot: Snapshot, leader_state: LeaderState) -> Lead | None:
    """Replace or delete one unreadable record; None if nothing is left to try."""
    for broken, restored in snapshot.repairs:
        txn = repair(snapshot, broken, restored)
        if txn == leader_state.repaired and not broken.key.startswith(snapshot.keys.control):
            # It had no effect, since the lease of its node has expired.
            txn = repair(snapshot, broken, Delete(broken.key))
        if txn != leader_state.repaired:
            return Lead(replace(leader_state, repaired=txn), txn)
    return None


def _watch_for_hang(
    snapshot: Snapshot, table: RankTable, done: frozenset[str], leader_state: LeaderState, times: Times, now_s: float
) -> Lead:
    """Declare a hang when the verdict has held for `confirm_s`; withdraw it when a node makes progress."""
    if not snapshot.hang and not snapshot.still.get(table.generation):
        return Lead(replace(leader_state, hang_since_s=None))
    if over := end_hang(snapshot, table, done):
        return Lead(leader_state, over)
    since_s = now_s if leader_state.hang_since_s is None else leader_state.hang_since_s
    records = snapshot.still.get(table.generation, {})
    hang = verdict_on(records, table, done, now_s - since_s, has_limit=times.hang_timeout_s > 0)
    if hang is None or (snapshot.hang and snapshot.hang.generation == table.generation):
        return Lead(replace(leader_state, hang_since_s=None))
    confirmed_s = since_s + confirm_s(times, table)
    if now_s >= confirmed_s:
        return Lead(leader_state, declare_hang(snapshot, table, hang))
    return Lead(replace(leader_state, hang_since_s=since_s), wake_s=confirmed_s)


def _lost(snapshot: Snapshot, table: RankTable, done: frozenset[str]) -> list[str]:
    """Seated nodes whose lease has ended before they were done. The death of a finished node restarts nothing."""
    return [s.node_id for s in table.seats if s.node_id not in snapshot.members and s.node_id not in done]


def _admit(
    snapshot: Snapshot, table: RankTable, done: frozenset[str], leader_state: LeaderState, times: Times, now_s: float
) -> Lead:
    """Open a generation for nodes that wait for a free seat, but not once a node is done."""
    terms = snapshot.terms
    assert terms
    seated = {seat.node_id for seat in table.seats}
    waiting = (n for n in snapshot.joined.get(table.generation, {}) if n in snapshot.members and n not in seated)
    ready = sorted(node_id for node_id in waiting if not is_excluded(node_id, table.excluded))
    newcomers = newcomers_of(table, (snapshot.members[node_id] for node_id in ready), terms.nodes_max)
    if not newcomers or done or terms.max_restarts == 0:
        return Lead(replace(leader_state, ready_since_s=None))
    since_s = now_s if leader_state.ready_since_s is None else leader_state.ready_since_s
    due_s = since_s + times.join_gather_s
    if leader_state.joined_at_s is not None:
        due_s = max(due_s, leader_state.joined_at_s + leader_state.join_interval_s)
    leader_state = replace(leader_state, ready_since_s=since_s)
    if now_s < due_s:
        return Lead(leader_state, wake_s=due_s)
    return Lead(_after_join(leader_state, times, now_s), open_join(snapshot, [node.node_id for node in newcomers]))


def _after_join(leader_state: LeaderState, times: Times, now_s: float) -> LeaderState:
    """Each newcomer costs all nodes a restart, so the interval grows while newcomers arrive soon after each other."""
    lasted_s = None if leader_state.joined_at_s is None else now_s - leader_state.joined_at_s
    if lasted_s is None or lasted_s > 2 * leader_state.join_interval_s:
        interval_s = times.join_backoff_min_s
    else:
        interval_s = min(2 * leader_state.join_interval_s, times.join_backoff_max_s)
    return replace(leader_state, ready_since_s=None, joined_at_s=now_s, join_interval_s=interval_s)
