"""The store behind a rendezvous: leases, guarded transactions, range reads, watches from a revision.

The semantics are the part of etcd v3's that the protocol uses. One contract test suite checks that the store in memory
and etcd behave alike. Every call blocks until its response, or until the store's call deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

# The version suffix of a store that `elaunch store` serves: its host need not be a node of the job.
SHARED = "+shared"


@dataclass(frozen=True)
class KeyEntry:
    """One key's value. Revisions count the store's writes; a repeated put keeps `create_revision`.

    The key is deleted when the lease `lease` ends; 0 means no lease.
    """

    value: str
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class View:
    """All keys under a prefix at one revision; they are whole (with the prefix) and sorted."""

    revision: int
    entries: Mapping[str, KeyEntry]


@dataclass(frozen=True)
class Changes:
    """Everything that one revision wrote under a watched prefix: new entries, and None for a deleted key."""

    revision: int
    entries: Mapping[str, KeyEntry | None]

    def under(self, prefix: str) -> Changes | None:
        """The changes of keys that start with `prefix`; None if there are none."""
        entries = {key: entry for key, entry in self.entries.items() if key.startswith(prefix)}
        return Changes(self.revision, entries) if entries else None


@dataclass(frozen=True)
class Absent:
    """Guard: the key does not exist."""

    key: str


@dataclass(frozen=True)
class Present:
    """Guard: the key exists."""

    key: str


@dataclass(frozen=True)
class Unchanged:
    """Guard: the key was not written since `mod_revision`."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class Empty:
    """Guard: no key starts with `prefix`."""

    prefix: str


@dataclass(frozen=True)
class NoneNewer:
    """Guard: no key that starts with `prefix` was written after `revision`. It does not notice deletions."""

    prefix: str
    revision: int


TxnGuard = Absent | Present | Unchanged | Empty | NoneNewer


@dataclass(frozen=True)
class Put:
    """Write a key. The key is deleted when its lease ends; if the lease has ended, the whole transaction fails."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete one key, or all keys in [`key`, `end`). A missing key is no error."""

    key: str
    end: str = ""


Op = Put | Delete


@dataclass(frozen=True)
class Txn:
    """All or nothing, at one revision: `then` if every guard holds, else `otherwise`.

    One list of operations may write each key only once.
    """

    guards: tuple[TxnGuard, ...]
    then: tuple[Op, ...] = ()
    otherwise: tuple[Op, ...] = ()


@dataclass(frozen=True)
class TxnResponse:
    """Whether the guards held, and the store's revision afterwards.

    If a response was lost and the transaction was sent again, `held` comes from the last response. False may then mean
    that the first transaction was committed.
    """

    held: bool
    revision: int


class StoreError(Exception):
    """Why a store did not carry out a request: one sentence, without a full stop."""


class Unavailable(StoreError):
    """No response in time: try again. `is_silent`: its host sent nothing at all, not even a refusal."""

    is_silent = False


class OwnLimit(Unavailable):
    """This process cannot open a connection: the state of the store is unknown."""


class HeadAway(Unavailable):
    """A node of the job serves the store, and it does not respond: the store has probably ended with that node.

    `is_silent` is set for a head only, whose ranks are then lost too; a host of `elaunch store` has none.
    """


class Rejected(StoreError):
    """The store responds, but refuses the request: try again, and log it for the user, who may have to act."""


class TimedOut(Unavailable):
    """No response within the deadline: the member may hang with its connections open."""


class Denied(Rejected):
    """Waiting does not help: a wrong secret, a missing permission, an old version, or no gateway.

    An agent that has not joined the job yet exits. An agent of the job keeps its workers, as after any rejection.
    """


class LeaseGone(StoreError):
    """The lease of a put has ended; nothing was written."""


class HistoryLost(StoreError):
    """This is not the same store: its revision went back, or it is another cluster."""


Update = Changes | View | StoreError


class Watch(Protocol):
    """A running watch on one prefix."""

    def begun(self) -> None:
        """Wait until the watch has started and has delivered its first `View`.

        Raises StoreError if the watch could not start; it is closed then.
        """

    def close(self) -> None:
        """Stop. After this returns no update is delivered, except one whose delivery has begun."""


class Store(Protocol):
    """The calls that a rendezvous makes. Every method may raise Unavailable, Denied or HistoryLost."""

    def check(self) -> str:
        """The server's version. Raises Denied if it cannot serve a job: too old, or a needed part is switched off."""

    def read(self, prefix: str) -> View:
        """All keys that start with `prefix`, at one revision."""

    def commit(self, txn: Txn) -> TxnResponse:
        """Run the transaction: `then` or `otherwise`. If it raises LeaseGone, nothing was written."""

    def grant(self, lease: int, ttl_s: float) -> None:
        """Create a lease with an id that the caller chose (1 … 2**63 - 1). Granting it again changes nothing."""

    def keep_alive(self, lease: int) -> float:
        """Renew the lease. Returns its TTL in seconds, 0 if it has ended."""

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys. A lease that has ended is no error."""

    def watch(self, prefix: str, after: int | None, notify: Callable[[Update], None]) -> Watch:
        """Call `notify` with what changes under `prefix` after revision `after`: each revision once, in order.

        With `after` None the first update is a `View` of what is there. A later `View` replaces all changes up to its
        revision: the store no longer has them one by one. A StoreError (Denied, HistoryLost) ends the watch. After
        Unavailable and after any other Rejected the watch retries automatically. `notify` is called from any thread and
        must return immediately.
        """

    def close(self) -> None:
        """Close connections and watches. Leases keep running."""
