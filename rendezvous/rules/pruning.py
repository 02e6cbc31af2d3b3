"""Deletes the keys of a job that nobody needs any more: while the job runs, and at its end."""

from __future__ import annotations

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.verdict import decisive_failure
from elaunch.rendezvous.store import Delete, Op
from elaunch.rendezvous.types import Outcome

# While the job runs, the failures of this many generations are kept, besides the first failed one.
FAILURES_KEPT = 20
# A transaction holds at most 128 operations, so one seal tidies up at most this many generations.
_TIDIED_MAX = 40
_ENDED_PARTS = ("joined", "detailed", "done", "still")


def outdated(snapshot: Snapshot, sealed: int) -> tuple[Op, ...]:
    """Deletes what nobody needs once generation `sealed` has its table, as ranges, however many nodes.

    The decisive failure stays for the first failed generation and for the last ones: the first shows how the trouble
    began, the last ones show what it became.
    """
    keys = snapshot.keys
    deletes: list[Op] = [
        Delete(keys.table(0), keys.table(sealed)),
        Delete(keys.joined(0), keys.joined(sealed)),
        Delete(keys.done(0), keys.done(sealed)),
        Delete(keys.detailed(0), keys.detailed(sealed)),
        Delete(keys.still(0), keys.still(sealed)),
        Delete(keys.hang),
    ]
    recorded = sorted(number for number in snapshot.failures if number < sealed)
    if len(recorded) > FAILURES_KEPT + 1:
        deletes.append(Delete(keys.failure(recorded[1]), keys.failure(recorded[-FAILURES_KEPT])))
        recorded = [recorded[0], *recorded[-FAILURES_KEPT:]]
    several = [number for number in recorded if len(snapshot.failures[number]) > 1]
    for number in several[-_TIDIED_MAX:]:
        deletes += _all_but(_judged(snapshot, number), keys.failure(number), keys.failure(number + 1))
    return tuple(deletes)


def ending(snapshot: Snapshot, outcome: Outcome) -> tuple[Op, ...]:
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
        said = [(f.generation, f.node_id, f.rank) for f in (outcome.failure, outcome.first) if f]
        is_said = (decided.generation, decided.node_id, decided.rank) in said
        ops += (Delete(start, end),) if is_said else _all_but(_judged(snapshot, first), start, end)
    return tuple(ops)


def _judged(snapshot: Snapshot, number: int) -> str:
    """The key of the generation's decisive failure."""
    return snapshot.keys.failure(number, decisive_failure(snapshot.failures[number]).node_id)


def _all_but(key: str, start: str, end: str) -> tuple[Op, ...]:
    return Delete(start, key), Delete(f"{key}\0", end)
