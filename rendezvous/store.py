"""The store that a rendezvous stands on: leases, guarded transactions, ranged reads, watches from a revision.

The semantics are etcd v3's, cut down to what the protocol uses, so that memory and etcd can be held equal by one
contract test-suite. All calls block until they are answered, at the longest for the store's call deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """One key's value. Revisions count the store's writes; `create_revision` is kept by a repeated put.

    `lease` is the lease at whose end the key goes away, 0 where it stays.
    """

    value: str
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class View:
    """What one or more prefixes held at one revision; keys are whole (with the prefix) and in order."""

    revision: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Changes:
    """All that one revision wrote under a watched prefix: new entries, and None for a key that went away."""

    revision: int
    entries: Mapping[str, Entry | None]


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
    """Guard: the key's last write is the one that was read."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class Empty:
    """Guard: no key starts with `prefix`."""

    prefix: str


@dataclass(frozen=True)
class NoneNewer:
    """Guard: no key that starts with `prefix` was written after `revision`; deletions are not seen."""

    prefix: str
    revision: int


Guard = Absent | Present | Unchanged | Empty | NoneNewer


@dataclass(frozen=True)
class Put:
    """Write a key; with a lease, it goes away when that ends. An ended lease fails the whole transaction."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete a key, or all keys from it to before `end`; absent ones are no error."""

    key: str
    end: str = ""


Op = Put | Delete


@dataclass(frozen=True)
class Txn:
    """All or nothing, at one revision: `then` where every guard holds, else `otherwise`.

    No key may be written twice by one list of operations.
    """

    guards: tuple[Guard, ...]
    then: tuple[Op, ...] = ()
    otherwise: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Whether the guards held, and the store's revision afterwards.

    Where an answer was lost on the way and the transaction was sent again, `held` is the last answer's: False may then
    mean that the first one happened.
    """

    held: bool
    revision: int


class StoreError(Exception):
    """Why a store did not do as it was asked: one sentence, without a full stop."""


class Unavailable(StoreError):
    """Nobody answered in time: try again."""


class HeadAway(Unavailable):
    """The store lives with a node of the job, and nobody answers there: it is likely to have ended with that node."""


class Rejected(StoreError):
    """The store answers, but does not do as asked: try again, and tell the user, who may have to act."""


class TimedOut(Unavailable):
    """Nobody answered within the deadline: the member may be hung, with its connections open."""


class Denied(Rejected):
    """Waiting alone does not help: the secret is wrong, a permission is missing, or a version, or the gateway.

    An agent that is not part of the job yet ends. An agent of the job keeps its workers, as after any rejection.
    """


class TooLarge(Rejected):
    """The request has more bytes than the store takes; a smaller one may succeed."""


class LeaseGone(StoreError):
    """The lease of a put has ended; nothing was written."""


class HistoryLost(StoreError):
    """The store is not the one that it was: its revisions went back, or it is another cluster."""


@dataclass(frozen=True)
class Deaf:
    """The store refuses a watch, which is tried again and again; `why` is a sentence without a full stop."""

    why: str


Update = Changes | View | Deaf | StoreError


class Watch(Protocol):
    """Word of what changes under a prefix."""

    def begun(self) -> None:
        """Wait until it tells what happens, its first `View` included; raises StoreError where it could not begin.

        It is closed then.
        """
        ...

    def close(self) -> None:
        """Nothing is told after this returns, save what is being told."""
        ...


class Store(Protocol):
    """What a rendezvous asks of its store. Every method may raise Unavailable, Denied or HistoryLost."""

    def check(self) -> str:
        """The server's version. Raises Denied where it is none that can hold a job: too old, a part switched off."""
        ...

    def read(self, *prefixes: str) -> View:
        """All keys that start with one of `prefixes`, at one revision."""
        ...

    def commit(self, txn: Txn) -> Answer:
        """Do the transaction, or its other branch. Raises LeaseGone, having written nothing."""
        ...

    def grant(self, lease: int, ttl_s: float) -> None:
        """Begin a lease under an id that the caller drew (1 … 2**63 - 1); granting it again changes nothing."""
        ...

    def keep_alive(self, lease: int) -> float:
        """Begin the lease's time anew; the seconds that it has now, 0 where it has ended."""
        ...

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; one that has ended is no error."""
        ...

    def watch(self, prefix: str, after: int | None, tell: Callable[[Update], None]) -> Watch:
        """Tell what changes under `prefix` after revision `after`: each revision once, in order, from any thread.

        For None that begins with a `View` of what is there. Elsewhere one stands for all changes up to its revision,
        where the store no longer has them one by one. A StoreError (Denied, HistoryLost) ends the watch; after
        Unavailable, and after any other Rejected, the watch tries again by itself. For a Rejected it tells `Deaf` once.
        `tell` must return at once.
        """
        ...

    def close(self) -> None:
        """Let go of connections and watches; leases are kept."""
        ...
