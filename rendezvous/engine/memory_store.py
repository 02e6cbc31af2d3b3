"""The store in this process's memory: for jobs on one node, where the agent is the only client, and for simulations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress

from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.engine.leases import LeaseExists, LeaseNotFound
from elaunch.rendezvous.engine.mvcc import UNBOUNDED, Compacted, KeyValue, Refused, WrittenRevision, prefix_end, within
from elaunch.rendezvous.engine.requests import (
    Compare,
    DeleteRequest,
    OpRequest,
    PutRequest,
    RangeRequest,
    Result,
    Target,
    TxnRequest,
)
from elaunch.rendezvous.store import (
    Absent,
    Answer,
    Changes,
    Delete,
    Empty,
    KeyEntry,
    LeaseGone,
    NoneNewer,
    Op,
    Present,
    Put,
    StoreError,
    Txn,
    TxnGuard,
    Unchanged,
    Update,
    View,
)

_BATCH_REVISIONS = 100
# Watches are up to date after each call. A restart writes some five revisions, and an agent may restart for weeks.
_HISTORY_REVISIONS = 200


class MemoryStore:
    """A `Store` for one thread; it ends with its process.

    A call that writes updates all watches before it returns. Each watch gets every update in order, even if a watch's
    `tell` writes again. Leases end only in `advance`. Callers may read and compact `engine`, but not write to it.
    """

    def __init__(self) -> None:
        self.engine = Engine(history_revisions=_HISTORY_REVISIONS)
        self._watches: list[_Watch] = []
        self._telling = False

    def check(self) -> str:
        return "in memory"

    def read(self, *prefixes: str) -> View:
        found: dict[bytes, KeyValue] = {}
        for prefix in prefixes:
            found.update((kv.key, kv) for kv in self.engine.range(RangeRequest(*_range(prefix))).kvs)
        entries = {kv.key.decode(): _entry(kv) for _, kv in sorted(found.items())}
        return View(self.engine.revision, entries)

    def commit(self, txn: Txn) -> Answer:
        request = TxnRequest(tuple(map(_compare, txn.guards)), _requests(txn.then), _requests(txn.otherwise))
        try:
            answer = self.engine.txn(request)
        except LeaseNotFound:
            raise LeaseGone("the lease of a put has ended") from None
        except Refused as refused:
            raise _store_error(refused) from None
        self._tell()
        return Answer(answer.succeeded, answer.revision)

    def grant(self, lease: int, ttl_s: float) -> None:
        with suppress(LeaseExists):
            self.engine.grant(lease, math.ceil(ttl_s))

    def keep_alive(self, lease: int) -> float:
        return float(self.engine.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        with suppress(LeaseNotFound):
            self.engine.revoke(lease)
        self._tell()

    def watch(self, prefix: str, after: int | None, tell: Callable[[Update], None]) -> _Watch:
        # A store begins at revision 1, at which nothing is written.
        watch = _Watch(prefix, max(after or 0, 1) + 1, tell)
        if after is None:
            watch.view(self.read(prefix))
        self._watches.append(watch)
        self._tell()
        return watch

    def close(self) -> None:
        for watch in self._watches:
            watch.close()

    def advance(self, now_s: float) -> None:
        """Set the time to `now_s`, on the caller's clock, and end the leases whose time is over."""
        self.engine.tell_time(now_s)
        self.engine.end_leases()
        self._tell()

    def _tell(self) -> None:
        if self._telling:
            # The `tell` of some watch wrote something. The loop below, further up the stack, will deliver it.
            return
        self._telling = True
        try:
            while behind := [watch for watch in self._watches if watch.next_revision <= self.engine.revision]:
                for watch in behind:
                    self._catch_up(watch)
                self._watches = [watch for watch in self._watches if not watch.closed]
        finally:
            self._telling = False

    def _catch_up(self, watch: _Watch) -> None:
        try:
            for written in self.engine.since(watch.next_revision, _BATCH_REVISIONS):
                watch.told(written)
        except Compacted:
            watch.view(self.read(watch.prefix))


class _Watch:
    """One watch, and the first revision that it has not delivered."""

    def __init__(self, prefix: str, next_revision: int, tell: Callable[[Update], None]) -> None:
        self.prefix = prefix
        self.next_revision = next_revision
        self.closed = False
        self._range = _range(prefix)
        self._tell = tell

    def begun(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def told(self, written: WrittenRevision) -> None:
        self.next_revision = written.revision + 1
        events = [event for event in written.events if within(event.key, *self._range)]
        if events and not self.closed:
            changes = {event.key.decode(): _entry(event) if event.version else None for event in events}
            self._tell(Changes(written.revision, changes))

    def view(self, view: View) -> None:
        self.next_revision = view.revision + 1
        if not self.closed:
            self._tell(view)


def _store_error(refused: Refused) -> StoreError:
    """The error that a client of etcd would raise for the same refusal."""
    # Imported here: without these modules a job on one node starts sooner.
    from elaunch.rendezvous.endpoint import Access, Endpoint
    from elaunch.rendezvous.etcd import errors, transport

    return errors.explain(transport.EtcdError(refused.code, refused.message), Endpoint("memory", 0), Access())


def _range(prefix: str) -> tuple[bytes, bytes]:
    return (prefix.encode(), prefix_end(prefix.encode())) if prefix else (UNBOUNDED, UNBOUNDED)


def _entry(kv: KeyValue) -> KeyEntry:
    return KeyEntry(kv.value.decode(), kv.create_revision, kv.mod_revision, kv.lease)


def _compare(guard: TxnGuard) -> Compare:
    match guard:
        case Absent(key):
            return Compare(Target.CREATE, Result.EQUAL, key.encode(), b"", 0)
        case Present(key):
            return Compare(Target.CREATE, Result.GREATER, key.encode(), b"", 0)
        case Unchanged(key, mod_revision):
            return Compare(Target.MOD, Result.EQUAL, key.encode(), b"", mod_revision)
        case Empty(prefix):
            return Compare(Target.CREATE, Result.EQUAL, *_range(prefix), 0)
        case NoneNewer(prefix, revision):
            return Compare(Target.MOD, Result.LESS, *_range(prefix), revision + 1)


def _requests(ops: Iterable[Op]) -> tuple[OpRequest, ...]:
    return tuple(map(_request, ops))


def _request(op: Op) -> OpRequest:
    match op:
        case Put(key, value, lease):
            return PutRequest(key.encode(), value.encode(), lease)
        case Delete(key, end):
            return DeleteRequest(key.encode(), end.encode())
