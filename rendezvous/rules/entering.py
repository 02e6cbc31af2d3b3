"""A node's own transactions: a new run, membership, joining a generation, being done, leading."""

from __future__ import annotations

import hashlib

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.pruning import ending
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot
from elaunch.rendezvous.store import Absent, Delete, Empty, Op, Present, Put, Txn
from elaunch.rendezvous.types import Failure, FailureKind, Generation, Joined, Node, OpenKind, Outcome, Terms

_OF_A_RUN = ("joined", "failures", "detailed", "done")


def start_run(snapshot: Snapshot, terms: Terms, me: Node, lease: int) -> Txn:
    """The first agent's transaction: this job's first run, or a new one on an id whose members are all gone.

    Numbers go on where the last run's ended: whatever still carries one of those is older than all that is to come.
    The run's keys stand on a lease of their own, `run_lease`. The agent that commits this transaction grants it.
    """
    keys = snapshot.keys
    number = snapshot.generation.number + 1 if snapshot.generation else 0
    run = _lease_of(keys, number, me.node_id, lease)
    return Txn(
        (snapshot.gen_guard, Empty(keys.members)),
        (
            *(Delete(f"{keys.root}{part}/", f"{keys.root}{part}0") for part in _OF_A_RUN),
            Delete(keys.table(0), keys.table(number)),
            Delete(keys.ended),
            Put(keys.spec, encode(terms), run),
            Put(keys.generation, encode(Generation(number, OpenKind.START, "the job starts")), run),
            Put(keys.leader, me.node_id, lease),
            Put(keys.member(me.node_id), encode(me), lease),
            Delete(keys.starter),
        ),
        (Delete(keys.starter),),
    )


def claim_start(keys: Keys, start: Txn) -> Txn:
    """Claims the start of a job's first run, which `start` makes; it holds for one node at a time.

    Many nodes of a new job start its run at once, and each would grant a lease for it. The claim stands on the node's
    own lease. It ends with that, or with the start.
    """
    mine = next(op for op in start.then if isinstance(op, Put) and op.key == keys.leader)
    return Txn((*start.guards, Absent(keys.starter)), (Put(keys.starter, mine.value, mine.lease),))


def run_lease(keys: Keys, txn: Txn) -> int:
    """The lease that a `start_run` needs beside the node's own; 0 for any other transaction."""
    return next((op.lease for op in txn.then if isinstance(op, Put) and op.key == keys.spec), 0)


def _lease_of(keys: Keys, number: int, node_id: str, lease: int) -> int:
    """The run's lease: the same id each time that this node tries to start this run, also where an answer was lost.

    Nobody can guess the id before the run is there. A lease that a stranger begins would end under the job.
    """
    drawn = hashlib.sha256(f"{keys.root}{number}/{node_id}/{lease}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") >> 1 or 1


def join(snapshot: Snapshot, me: Node, joined: Joined, lease: int, *, is_member: bool) -> Txn:
    """A node's word that it can run the newest generation; the first one makes it a member.

    A member whose key is gone was evicted: it is refused, and comes back as a new node.
    """
    assert snapshot.generation
    keys = snapshot.keys
    puts = (Put(keys.joined(snapshot.generation.number, me.node_id), encode(joined), lease),)
    if is_member:
        return Txn((snapshot.gen_guard, snapshot.live_guard, Present(keys.member(me.node_id))), puts)
    return Txn((snapshot.gen_guard, snapshot.live_guard), (*puts, Put(keys.member(me.node_id), encode(me), lease)))


def return_as_member(snapshot: Snapshot, me: Node, lease: int) -> Txn:
    """After a lost lease: the same node goes on, if no generation was opened meanwhile."""
    return Txn((snapshot.gen_guard, snapshot.live_guard), (Put(snapshot.keys.member(me.node_id), encode(me), lease),))


def become_leader(snapshot: Snapshot, me: Node, lease: int) -> Txn:
    """Lead, if nobody does."""
    keys = snapshot.keys
    return Txn(
        (Absent(keys.leader), snapshot.live_guard, Present(keys.member(me.node_id))),
        (Put(keys.leader, me.node_id, lease),),
    )


def still_member(snapshot: Snapshot, me: Node) -> Txn:
    """Nothing is written; it holds while this node's member key is there, which a follower does not look at."""
    return Txn((Present(snapshot.keys.member(me.node_id)),))


def is_done(snapshot: Snapshot, me: Node, generation: int) -> Txn:
    """All workers of this node exited with 0."""
    return Txn(
        (snapshot.gen_guard, snapshot.live_guard), (snapshot.put(snapshot.keys.done(generation, me.node_id), ""),)
    )


def fail(snapshot: Snapshot, me: Node, failure: Failure) -> Txn:
    """Open the next generation together with the failure that is its cause; where one is open, the record only.

    Traceback and output follow in `complete`, so no text of a program makes this transaction large. If no peer's end
    explains the failure, the generation is judged by it, and its record will be the one in full.
    """
    keys, newest, failed_in = snapshot.keys, snapshot.generation, failure.generation
    record = snapshot.put(keys.failure(failed_in, me.node_id), encode(failure.opening))
    number = failed_in + 1
    if newest and newest.number > failed_in:
        # Of these two alone somebody waits for this node's workers to end well; and if it is not the next one, then
        # others have had a table since, perhaps those of another run.
        is_hurried = newest.kind in (OpenKind.JOIN, OpenKind.LEAVE) and newest.number == failed_in + 1
        if not is_hurried:
            return Txn(()) if _is_of_another_run(snapshot, failure) else Txn((snapshot.live_guard,), (record,))
        number = newest.number + 1
    opened = snapshot.put(keys.generation, encode(Generation(number, OpenKind.FAIL, failure.sentence, me.node_id)))
    writes: list[Op] = [opened, record]
    if failure.kind is not FailureKind.PEER_LOST:
        writes.append(snapshot.put(keys.detailed(failed_in, me.node_id), ""))
    return Txn((snapshot.gen_guard, snapshot.live_guard), tuple(writes), (record,))


def complete(snapshot: Snapshot, me: Node, failure: Failure) -> tuple[Txn, ...]:
    """The record of a failure once its output is here: log tail, traceback, and what it was after all.

    One record of a generation is in full: its opener's, else the first that no peer's end explains. The others are
    brief, since a thousand nodes may fail at once. Nothing is written into the records by which another run is judged.
    """
    if _is_of_another_run(snapshot, failure):
        return ()
    keys, live, g = snapshot.keys, snapshot.live_guard, failure.generation
    key, mine = keys.failure(g, me.node_id), keys.detailed(g, me.node_id)
    brief = snapshot.put(key, encode(failure.brief))
    if failure.kind is FailureKind.PEER_LOST:
        # At first it may not have looked like a peer's end.
        return (Txn((live,), (brief, Delete(mine))),)
    full = snapshot.put(key, encode(failure))
    if full == brief:
        return (Txn((live,), (full,)),)
    # Without the generation's table the generation has been judged already. If an answer is lost and a transaction is
    # sent again, it changes nothing more.
    return (
        Txn((live,), (brief,)),
        Txn((live, Present(keys.table(g)), Empty(keys.detailed(g))), (snapshot.put(mine, ""),)),
        Txn((live, Present(mine)), (full,)),
    )


def _is_of_another_run(snapshot: Snapshot, failure: Failure) -> bool:
    newest = snapshot.generation
    return newest is not None and newest.kind is OpenKind.START and newest.number > failure.generation


def leave(snapshot: Snapshot, me: Node, *, opens: bool, why: str, signum: int = 0) -> Txn:
    """Go, and say so: the others need not wait for a lease's end. `opens` where they must do without a seated node.

    They are told which signal it leaves by: a scheduler may have sent it to all, one after the other.
    """
    keys, generation = snapshot.keys, snapshot.generation
    number = generation.number if generation else 0
    own: tuple[Op, ...] = (Delete(keys.member(me.node_id)), Delete(keys.joined(number, me.node_id)))
    if not opens or generation is None:
        return Txn((), own)
    opened = Generation(number + 1, OpenKind.LEAVE, f"{me.host} leaves ({why})", me.node_id, signum)
    guards = (snapshot.gen_guard, snapshot.live_guard)
    return Txn(guards, (snapshot.put(keys.generation, encode(opened)), *own), own)


def abdicate(snapshot: Snapshot) -> Txn:
    """Leave the lead to others at once; where another has it already, nothing happens."""
    return Txn((snapshot.leader_guard,), (Delete(snapshot.keys.leader),))


def end(snapshot: Snapshot, outcome: Outcome) -> Txn:
    """A person ends the job: nothing that is being formed can stand against that."""
    return Txn((snapshot.live_guard,), ending(snapshot, outcome))
