"""The store that a rendezvous stands on: guarded transactions, reads of a prefix, and word that something changed.

The semantics are etcd v3's, cut down to what the protocol uses, so that memory and etcd can be held equal by one
contract test-suite. A watch carries no values: decisions are made from a `View`, never from an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """One key's value. Revisions count the store's writes; `create_revision` is kept by a repeated put."""

    value: str
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class View:
    """What a prefix held at one revision; keys are whole (with the prefix) and in order."""

    revision: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Absent:
    """Guard: the key does not exist."""

    key: str


@dataclass(frozen=True)
class Unchanged:
    """Guard: the key's last write is the one that was read."""

    key: str
    mod_revision: int


Guard = Absent | Unchanged


@dataclass(frozen=True)
class Txn:
    """All or nothing: where every guard holds, `puts` and `deletes` happen at one revision."""

    guards: tuple[Guard, ...]
    puts: Mapping[str, str] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()


class Store(Protocol):
    """What the agent asks of its store."""

    def read(self, prefix: str) -> View:
        """All keys that start with `prefix`."""
        ...

    def commit(self, txn: Txn) -> bool:
        """Whether the guards held and the transaction happened."""
        ...

    def watch(self, prefix: str, changed: Callable[[], None]) -> None:
        """Call `changed` after every commit that wrote or deleted a key under `prefix`; it must return at once."""
        ...
