"""Every transaction of the protocol as data: its guards, what it writes if they hold, what it writes if they do not.

The upper half is what any node may write about itself; the lower half is what only the leader writes.
docs/protocol.md has the table of transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.restart_policy import decisive_failure
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, encode_table
from elaunch.rendezvous.store import Absent, Delete, Empty, NoneNewer, Op, Present, Put, Txn, TxnGuard, Unchanged
from elaunch.rendezvous.types import (
    Failure,
    Generation,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    Terms,
    host_of,
)

_RUN_PARTS = ("joined", "failures", "done", "still")
_ENDED_PARTS = ("joined", "done", "still")
_NAMES_SHOWN = 3
# Each lost node needs two guards; etcd takes 128 in one transaction.
_LOST_GUARDED = 50


def start_run(snapshot: Snapshot, terms: Terms, me: Node, lease: int) -> Txn:
    """Start this job's first run, or a new run on an id whose members are all gone.

    Generation numbers continue where the last run's ended: a record with one of those numbers is older than every
    record of the new run. The run's keys are attached to a lease of their own, `run_lease`. The agent that commits this
    transaction grants that lease.
    """
    keys = snapshot.keys
    number = snapshot.generation.number + 1 if snapshot.generation else 0
    run = _new_run_lease(keys, number, me.node_id, lease)
    return Txn(
        (snapshot.gen_guard, Empty(keys.members)),
        (
            *(Delete(f"{keys.root}{part}/", f"{keys.root}{part}0") for part in _RUN_PARTS),
            Delete(keys.table(0), keys.table(number)),
            Delete(keys.ended),
            Delete(keys.hang),
            Put(keys.spec, encode(terms), run),
            Put(keys.generation, encode(Generation(number, OpenKind.START, "the job starts")), run),
            Put(keys.leader, me.node_id, lease),
            Put(keys.member(me.node_id), encode(me), lease),
        ),
    )


def run_lease(keys: Keys, txn: Txn) -> int:
    """The run's lease, which `start_run` needs besides the node's own; 0 for any other transaction."""
    return next((op.lease for op in txn.then if isinstance(op, Put) and op.key == keys.spec), 0)


def _new_run_lease(keys: Keys, number: int, node_id: str, lease: int) -> int:
    """The run's lease id. It is the same each time this node tries to start this run, even after a lost response.

    No other client can guess the id before the run exists. If one could create that lease first, the lease might expire
    while the job runs.
    """
    digest = sha256(f"{keys.root}{number}/{node_id}/{lease}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 or 1


def join(snapshot: Snapshot, me: Node, joined: Joined, lease: int, *, is_member: bool) -> Txn:
    """Record that this node can run the newest generation; a node's first join also makes it a member.

    A member whose key is gone was evicted: its join is refused, and it returns as a new node.
    """
    assert snapshot.generation
    keys = snapshot.keys
    puts = (Put(keys.joined(snapshot.generation.number, me.node_id), encode(joined), lease),)
    if is_member:
        return Txn((*snapshot.node_guards, Present(keys.member(me.node_id))), puts)
    return Txn(snapshot.node_guards, (*puts, Put(keys.member(me.node_id), encode(me), lease)))


def return_as_member(snapshot: Snapshot, me: Node, lease: int) -> Txn:
    """Restore the membership of a node whose lease ended, if no generation was opened meanwhile."""
    return Txn(snapshot.node_guards, (Put(snapshot.keys.member(me.node_id), encode(me), lease),))


def confirm_membership(snapshot: Snapshot, me: Node) -> Txn:
    """Write nothing; the guard holds while this node's member key exists, which a follower's watch does not cover."""
    return Txn((Present(snapshot.keys.member(me.node_id)),))


def become_leader(snapshot: Snapshot, me: Node, lease: int) -> Txn:
    """Become the leader if there is none, or its name cannot be read."""
    keys = snapshot.keys
    free = snapshot.leader_guard if snapshot.leader_revision and not snapshot.leader else Absent(keys.leader)
    return Txn((free, snapshot.live_guard, Present(keys.member(me.node_id))), (Put(keys.leader, me.node_id, lease),))


def report_done(snapshot: Snapshot, me: Node, generation: int) -> Txn:
    """Record that all workers of this node exited with 0."""
    return Txn(snapshot.node_guards, (snapshot.put(snapshot.keys.done(generation, me.node_id), ""),))


def fail(snapshot: Snapshot, me: Node, failure: Failure) -> Txn:
    """Open the next generation and record the failure that caused it; if one is open already, write the record only.

    `complete` adds traceback and output later, so no program's text makes this transaction large.
    """
    keys, newest, failed_in = snapshot.keys, snapshot.generation, failure.generation
    record = snapshot.put(keys.failure(failed_in, me.node_id), encode(failure.opening))
    number = failed_in + 1
    if newest and newest.number > failed_in:
        # After JOIN and LEAVE the other nodes wait for the workers to finish a step, so a failure must be announced.
        # If the newest generation is not the next one, other nodes have sealed a table since, perhaps in another run.
        is_hurried = newest.kind in (OpenKind.JOIN, OpenKind.LEAVE) and newest.number == failed_in + 1
        if not is_hurried:
            return Txn((snapshot.live_guard,), () if _is_of_another_run(snapshot, failure) else (record,))
        number = newest.number + 1
    opened = _failed(number, failure, me.node_id)
    return Txn(snapshot.node_guards, (snapshot.put(keys.generation, encode(opened)), record), (record,))


def complete(snapshot: Snapshot, me: Node, failure: Failure) -> Txn:
    """Rewrite a failure's record once its log tail, its traceback and its final kind are known.

    A thousand nodes may fail at once, so the more nodes the job has, the shorter the texts. Nothing is written if
    another run has begun: that run is not judged by this failure.
    """
    if _is_of_another_run(snapshot, failure):
        return Txn((snapshot.live_guard,))
    record = failure.one_of(len(snapshot.table.seats) if snapshot.table else 1)
    key = snapshot.keys.failure(failure.generation, me.node_id)
    return Txn((snapshot.live_guard,), (snapshot.put(key, encode(record)),))


def _failed(number: int, failure: Failure, node_id: str) -> Generation:
    return Generation(number, OpenKind.FAIL, failure.sentence, node_id, is_secondary=failure.kind.is_secondary)


def _is_of_another_run(snapshot: Snapshot, failure: Failure) -> bool:
    newest = snapshot.generation
    return newest is not None and newest.kind is OpenKind.START and newest.number > failure.generation


def leave(snapshot: Snapshot, me: Node, *, opens: bool, why: str, signum: int = 0) -> Txn:
    """Leave the job immediately, so that the other nodes need not wait until this node's lease ends.

    `opens`: a generation is opened, since this node has a seat and the others must continue without it. `signum` is the
    signal that made it leave: a scheduler may send that signal to all nodes, one after the other.
    """
    keys, generation = snapshot.keys, snapshot.generation
    number = generation.number if generation else 0
    own: tuple[Op, ...] = (Delete(keys.member(me.node_id)), Delete(keys.joined(number, me.node_id)))
    if not opens or generation is None:
        return Txn((), own)
    opened = Generation(number + 1, OpenKind.LEAVE, f"{me.host} leaves ({why})", me.node_id, signum)
    return Txn(snapshot.node_guards, (snapshot.put(keys.generation, encode(opened)), *own), own)


def resign(snapshot: Snapshot) -> Txn:
    """Resign as the leader, so that another node can lead. Nothing happens if another node leads already."""
    return Txn((snapshot.leader_guard,), (Delete(snapshot.keys.leader),))


def end_job(snapshot: Snapshot, outcome: Outcome) -> Txn:
    """End the job because its user requested it. This needs no guard on what is being formed: the user's order wins."""
    return Txn((snapshot.live_guard,), _ending(snapshot, outcome))


def open_restart(snapshot: Snapshot, cause: str) -> Txn:
    """Open a generation because a person requested it; never while one is still forming."""
    assert snapshot.generation
    keys, number = snapshot.keys, snapshot.generation.number
    opened = Generation(number + 1, OpenKind.RESTART, cause)
    return Txn((*snapshot.node_guards, Present(keys.table(number))), (snapshot.put(keys.generation, encode(opened)),))


# --- Only the leader writes what follows.


def open_failed(snapshot: Snapshot, failure: Failure) -> Txn:
    """Open a generation after a failure whose node could not: its guard failed, as the key was overwritten."""
    assert snapshot.generation
    return _open(snapshot, _failed(snapshot.generation.number + 1, failure, failure.node_id), ())


def open_loss(snapshot: Snapshot, lost: list[str]) -> Txn:
    """Open a generation without these seated nodes, whose leases have ended.

    Two absences are guarded for each node: a member key that exists again belongs to a live node, and a node that is
    done is not lost. If very many nodes are lost, only some of them are guarded: one lost node is enough to open a
    generation, and the leader that forms it checks all nodes.
    """
    keys, table, generation = snapshot.keys, snapshot.table, snapshot.generation
    assert table
    assert generation
    if generation.kind is OpenKind.LEAVE and generation.number > table.generation:
        cause = f"{generation.cause}; {hosts(lost)} left too, or {'was' if len(lost) == 1 else 'were'} lost"
    else:
        cause = loss_of(lost)
    opened = Generation(generation.number + 1, OpenKind.LOSS, cause)
    absences: list[TxnGuard] = []
    for node_id in lost[:_LOST_GUARDED]:
        absences += [Absent(keys.member(node_id)), Absent(keys.done(table.generation, node_id))]
    return _open(snapshot, opened, tuple(absences))


def open_join(snapshot: Snapshot, ready: list[str]) -> Txn:
    """Open a generation that seats the nodes in `ready`; never once a node is done, since it would run again."""
    generation = snapshot.generation
    assert generation
    cause = f"{hosts(ready)} join{'s' if len(ready) == 1 else ''}"
    opened = Generation(generation.number + 1, OpenKind.JOIN, cause)
    keys, number = snapshot.keys, generation.number
    # A transaction holds 128 guards and writes, so only one newcomer is guarded; one is enough to open a generation.
    there = Present(keys.joined(number, ready[0]))
    return _open(snapshot, opened, (there, Present(keys.table(number)), Empty(keys.done(number))))


def repair(snapshot: Snapshot, broken: Unchanged, restored: Op) -> Txn:
    """Restore or delete an unreadable record, since guards of other transactions would fail because of it.

    A node with a seat that has joined the forming generation does not check its record before the next one. So if its
    record is deleted, that one is opened: the node joins again, or returns as a new node.
    """
    keys, table, generation = snapshot.keys, snapshot.table, snapshot.generation
    node_id, ops = broken.key.rpartition("/")[2], [restored]
    has_joined = generation and broken.key in (keys.member(node_id), keys.joined(generation.number, node_id))
    is_forming = table is not None and not snapshot.current_table and table.group_rank(node_id) is not None
    if isinstance(restored, Delete) and generation and has_joined and is_forming:
        cause = f"a record of {host_of(node_id)} in the store could not be read"
        ops.append(snapshot.put(keys.generation, encode(Generation(generation.number + 1, OpenKind.LOSS, cause))))
    return Txn((*snapshot.leader_guards, broken), tuple(ops))


def evict(snapshot: Snapshot, node_id: str) -> Txn:
    """Remove a member that has not joined the forming generation."""
    assert snapshot.generation
    keys = snapshot.keys
    not_joined = Absent(keys.joined(snapshot.generation.number, node_id))
    return Txn((*snapshot.leader_guards, not_joined), (Delete(keys.member(node_id)),))


def seal_table(snapshot: Snapshot, table: RankTable) -> Txn:
    """Write the forming generation's table. It fails if any node has joined since the snapshot."""
    keys = snapshot.keys
    guards = (
        *snapshot.leader_guards,
        Absent(keys.table(table.generation)),
        NoneNewer(keys.joined(table.generation), snapshot.revision),
    )
    sealed = snapshot.put(keys.table(table.generation), encode_table(table))
    return Txn(guards, (sealed, *_outdated(snapshot, table.generation)))


def end_unformed(snapshot: Snapshot, outcome: Outcome) -> Txn:
    """End the job instead of forming its newest generation. Fails if a node has become a member since the snapshot."""
    assert snapshot.generation
    keys = snapshot.keys
    guards = (
        *snapshot.leader_guards,
        Absent(keys.table(snapshot.generation.number)),
        NoneNewer(keys.members, snapshot.revision),
    )
    return Txn(guards, _ending(snapshot, outcome))


def succeed(snapshot: Snapshot, terms: Terms, table: RankTable) -> Txn:
    reason = "every worker exited with 0"
    outcome = Outcome(OutcomeKind.SUCCEEDED, reason, table.generation, table.restarts, terms.max_restarts)
    return Txn(snapshot.leader_guards, _ending(snapshot, outcome))


def loss_of(lost: list[str]) -> str:
    """The cause of a generation that is opened because these nodes' leases ended."""
    return f"{hosts(lost)} {'was' if len(lost) == 1 else 'were'} lost: no heartbeat from the elaunch that ran there"


def hosts(node_ids: list[str]) -> str:
    """The names of these nodes' hosts, for people."""
    return first_names(sorted({host_of(node_id) for node_id in node_ids}))


def first_names(names: Sequence[str]) -> str:
    """The first few of these names, and how many more there are."""
    left = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {left} more" if left > 0 else "")


def _open(snapshot: Snapshot, opened: Generation, guards: tuple[TxnGuard, ...]) -> Txn:
    return Txn((*snapshot.leader_guards, *guards), (snapshot.put(snapshot.keys.generation, encode(opened)),))


# --- Obsolete keys.


def _outdated(snapshot: Snapshot, sealed: int) -> tuple[Op, ...]:
    """Deletes, as ranges, what is obsolete once generation `sealed` has its table, whatever the number of nodes.

    The decisive failure stays for the first failed generation, which shows how the trouble began, and for the last one,
    with which the next is compared.
    """
    keys = snapshot.keys
    deletes: list[Op] = [
        Delete(keys.table(0), keys.table(sealed)),
        Delete(keys.joined(0), keys.joined(sealed)),
        Delete(keys.done(0), keys.done(sealed)),
        Delete(keys.still(0), keys.still(sealed)),
        Delete(keys.hang),
    ]
    recorded = sorted(number for number in snapshot.failures if number < sealed)
    if len(recorded) > 2:
        deletes.append(Delete(keys.failure(recorded[1]), keys.failure(recorded[-1])))
    for number in sorted({*recorded[:1], *recorded[-1:]}):
        if len(snapshot.failures[number]) > 1:
            deletes += _all_but(_judged(snapshot, number), keys.failure(number), keys.failure(number + 1))
    return tuple(deletes)


def _ending(snapshot: Snapshot, outcome: Outcome) -> tuple[Op, ...]:
    """Writes the outcome and deletes the rest. Terms, the last table and the first failure stay for later readers.

    An agent that does not see the failures leaves them: they are deleted when the run's lease ends.
    """
    keys = snapshot.keys
    ops: list[Op] = [
        snapshot.put(keys.ended, encode(outcome)),
        *(Delete(f"{keys.root}{part}/", f"{keys.root}{part}0") for part in _ENDED_PARTS),
        Delete(keys.hang),
    ]
    if snapshot.tables:
        ops.append(Delete(keys.table(0), keys.table(max(snapshot.tables))))
    start, end = f"{keys.root}failures/", f"{keys.root}failures0"
    if snapshot.failures:
        first = min(snapshot.failures)
        decided = decisive_failure(snapshot.failures[first])
        # The outcome's text may name other ranks too.
        included = [(f.generation, f.node_id, f.rank) for f in (outcome.failure, outcome.first) if f]
        is_included = (decided.generation, decided.node_id, decided.rank) in included
        ops += (Delete(start, end),) if is_included else _all_but(_judged(snapshot, first), start, end)
    return tuple(ops)


def _judged(snapshot: Snapshot, number: int) -> str:
    """The key of the generation's decisive failure."""
    return snapshot.keys.failure(number, decisive_failure(snapshot.failures[number]).node_id)


def _all_but(key: str, start: str, end: str) -> tuple[Op, ...]:
    return Delete(start, key), Delete(f"{key}\0", end)
