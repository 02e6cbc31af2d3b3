"""The leader's two reasons to open a generation: nodes were lost, nodes wait to join."""

from __future__ import annotations

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.store import Absent, Empty, Guard, Present, Txn
from elaunch.rendezvous.types import Generation, OpenKind, host_of

_NAMES_SHOWN = 3
# Two guards each; etcd takes 128 in one transaction.
_LOST_GUARDED = 50


def open_loss(snapshot: Snapshot, lost: list[str]) -> Txn:
    """Go on without these seated nodes.

    Both absences are guarded: a member key made again meanwhile is a node that lives, and nobody misses one that is
    done. Of very many, some are guarded: it takes one that is lost, and who forms the generation looks at all.
    """
    keys, table, generation = snapshot.keys, snapshot.table, snapshot.generation
    assert table
    assert generation
    if generation.kind is OpenKind.LEAVE and generation.number > table.generation:
        cause = f"{generation.cause}; {hosts(lost)} left too, or {'was' if len(lost) == 1 else 'were'} lost"
    else:
        cause = was_lost(lost)
    opened = Generation(generation.number + 1, OpenKind.LOSS, cause)
    absences: list[Guard] = []
    for node_id in lost[:_LOST_GUARDED]:
        absences += [Absent(keys.member(node_id)), Absent(keys.done(table.generation, node_id))]
    return _open(snapshot, opened, tuple(absences))


def open_join(snapshot: Snapshot, ready: list[str]) -> Txn:
    """Make room at the table for nodes that wait for a seat; never once a node is done: it would run all again."""
    generation = snapshot.generation
    assert generation
    cause = f"{hosts(ready)} join{'s' if len(ready) == 1 else ''}"
    opened = Generation(generation.number + 1, OpenKind.JOIN, cause)
    keys, number = snapshot.keys, generation.number
    # One of them is enough to be worth it, and a transaction holds 128 guards and writes.
    there = Present(keys.joined(number, ready[0]))
    return _open(snapshot, opened, (there, Present(keys.table(number)), Empty(keys.done(number))))


def was_lost(lost: list[str]) -> str:
    """What is said of nodes whose lease has ended."""
    return f"{hosts(lost)} {'was' if len(lost) == 1 else 'were'} lost: no sign of life from the elaunch that ran there"


def hosts(node_ids: list[str]) -> str:
    """Their hosts' names, for people."""
    names = sorted({host_of(node_id) for node_id in node_ids})
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _open(snapshot: Snapshot, opened: Generation, guards: tuple[Guard, ...]) -> Txn:
    leader = (snapshot.gen_guard, snapshot.live_guard, snapshot.leader_guard)
    return Txn((*leader, *guards), (snapshot.put(snapshot.keys.generation, encode(opened)),))
