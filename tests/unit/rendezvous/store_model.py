"""The simplest model of a store: a dictionary, and a list of the writes of each revision."""

from __future__ import annotations

import random
from collections.abc import Sequence

from elaunch.rendezvous.store import (
    Absent,
    Changes,
    Delete,
    Empty,
    KeyEntry,
    NoneNewer,
    Op,
    Present,
    Put,
    Txn,
    TxnGuard,
    TxnResponse,
    Unchanged,
    View,
)


class Model:
    """A store without leases, whose next write has the revision after `revision`."""

    def __init__(self, revision: int) -> None:
        self.first = self.revision = revision
        self.entries: dict[str, KeyEntry] = {}
        self._written: list[Changes] = []

    def read(self, prefix: str) -> View:
        return View(self.revision, {key: self.entries[key] for key in sorted(self.entries) if key.startswith(prefix)})

    def commit(self, txn: Txn) -> TxnResponse:
        held = all(self._holds(guard) for guard in txn.guards)
        revision = self.revision + 1
        written: dict[str, KeyEntry | None] = {}
        for op in txn.then if held else txn.otherwise:
            match op:
                case Put(key, value, lease):
                    old = self.entries.get(key)
                    entry = KeyEntry(value, old.create_revision if old else revision, revision, lease)
                    self.entries[key] = written[key] = entry
                case Delete(key, end):
                    for gone in [k for k in self.entries if (key <= k < end if end else k == key)]:
                        del self.entries[gone]
                        written[gone] = None
        if written:
            self.revision = revision
            self._written.append(Changes(revision, written))
        return TxnResponse(held, self.revision)

    def changes(self, prefix: str, after: int) -> list[Changes]:
        """The changes that a watch of `prefix` must report after revision `after`."""
        since = [
            Changes(changes.revision, {key: e for key, e in changes.entries.items() if key.startswith(prefix)})
            for changes in self._written
            if changes.revision > after
        ]
        return [changes for changes in since if changes.entries]

    def _holds(self, guard: TxnGuard) -> bool:
        match guard:
            case Absent(key):
                return key not in self.entries
            case Present(key):
                return key in self.entries
            case Unchanged(key, mod_revision):
                return key in self.entries and self.entries[key].mod_revision == mod_revision
            case Empty(prefix):
                return not self.read(prefix).entries
            case NoneNewer(prefix, revision):
                return all(entry.mod_revision <= revision for entry in self.read(prefix).entries.values())


def random_txn(rng: random.Random, model: Model, keys: Sequence[str], prefixes: Sequence[str], value: str) -> Txn:
    """A transaction on some of `keys`; its guards hold about as often as not."""
    return Txn(
        tuple(_guard(rng, model, keys, prefixes) for _ in range(rng.randint(0, 2))),
        _ops(rng, keys, value),
        _ops(rng, keys, f"not {value}"),
    )


def _guard(rng: random.Random, model: Model, keys: Sequence[str], prefixes: Sequence[str]) -> TxnGuard:
    key, prefix = rng.choice(keys), rng.choice(prefixes)
    # Revisions of late, so that about half of these hold.
    revision = max(model.revision - rng.randint(0, 3), model.first)
    entry = model.entries.get(key)
    mod_revision = entry.mod_revision if entry and rng.random() < 0.7 else revision
    guards: list[TxnGuard] = [
        Absent(key),
        Present(key),
        Unchanged(key, mod_revision),
        Empty(prefix),
        NoneNewer(prefix, revision),
    ]
    return rng.choice(guards)


def _ops(rng: random.Random, keys: Sequence[str], value: str) -> tuple[Op, ...]:
    """Puts of some keys, and deletions of others: a key may not be written twice."""
    cut = rng.randint(0, len(keys))
    first, rest = sorted(keys)[:cut], sorted(keys)[cut:]
    puts = [Put(key, value) for key in rng.sample(first, min(len(first), rng.randint(0, 2)))]
    deletes: list[Op] = [Delete(key) for key in rng.sample(rest, min(len(rest), rng.randint(0, 1)))]
    if len(rest) > 1 and rng.random() < 0.2:
        deletes = [Delete(rest[0], rest[-1])]
    ops = [*puts, *deletes]
    rng.shuffle(ops)
    return tuple(ops)
