"""The part of etcd v3 that a rendezvous uses: keys, revisions, leases, transactions; and an in-memory store."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd import errors
from elaunch.rendezvous.etcd.transport import EtcdError
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
    Update,
    View,
)

# etcd's --max-request-bytes and --max-txn-ops.
REQUEST_BYTES_MAX = 3 << 19
OPS_MAX = 128
HISTORY_REVISIONS = 10_000
# Memory of all keys, their history and the leases. This process runs on the head, where the workers need the memory.
QUOTA_BYTES = 256 << 20
# etcd's minimum at its default election timeout, and its own maximum, about 285 years.
TTL_MIN_S = 2
TTL_MAX_S = 9_000_000_000
# Memory of an entry besides key and value, and of a lease: measured, and rounded up.
_ENTRY_BYTES = 320
_LEASE_BYTES = 1024
_LEASE_NOT_FOUND = (errors.NOT_FOUND, "etcdserver: requested lease not found")


class _Lease:
    """One lease. `ends_s` is on the caller's clock; `keys` are deleted when the lease expires or is revoked."""

    def __init__(self, ttl_s: int, ends_s: float) -> None:
        self.ttl_s = ttl_s
        self.ends_s = ends_s
        self.keys: set[str] = set()


class Engine:
    """One store's keys and leases.

    Every method that writes may raise EtcdError, with etcd's text; nothing was changed then. Leases expire only in
    `end_leases`. About the last `history_revisions` revisions can be watched, fewer if they would fill the store. A
    write that would take more than `quota_bytes` of memory is refused. Deleting a key frees its memory immediately; a
    real etcd must be compacted first, and its alarm disarmed.
    """

    def __init__(self, *, history_revisions: int = HISTORY_REVISIONS, quota_bytes: int = QUOTA_BYTES) -> None:
        self.revision = 1
        # No lease expires before this time.
        self.idle_until_s = math.inf
        # Called with each new revision, before the response to the write that made it.
        self.listener: Callable[[Changes], None] = lambda changes: None
        self._history_revisions = history_revisions
        self.quota_bytes = quota_bytes
        self._entries: dict[str, KeyEntry] = {}
        self._index: list[str] = []
        self._entries_bytes = 0
        # The changes of the last revisions, in order.
        self._history: list[Changes] = []
        self._history_bytes = 0
        self._leases: dict[int, _Lease] = {}
        self._now_s = 0.0

    def read(self, prefix: str) -> View:
        return View(self.revision, {key: self._entries[key] for key in self._keys_under(prefix)})

    def commit(self, txn: Txn) -> TxnResponse:
        """Run one branch, at one revision: `then` if every guard holds, else `otherwise`."""
        size = _checked_size(txn)
        if any(isinstance(op, Put) for op in (*txn.then, *txn.otherwise)):
            self._check_space(size)
        held = all(map(self._holds, txn.guards))
        branch = txn.then if held else txn.otherwise
        if any(isinstance(op, Put) and op.lease and op.lease not in self._leases for op in branch):
            raise EtcdError(*_LEASE_NOT_FOUND)
        self._write(branch)
        return TxnResponse(held, self.revision)

    @property
    def first_revision(self) -> int:
        return self.revision + 1 - len(self._history)

    def since(self, revision: int, count_max: int) -> Sequence[Changes] | None:
        """At most `count_max` revisions in order, beginning with `revision`; None if that one is compacted."""
        if revision < self.first_revision and self.first_revision > 2:
            return None
        start = max(revision - self.first_revision, 0)
        return self._history[start : start + count_max]

    def compact(self, revision: int) -> None:
        """Drop the history before `revision`."""
        count = max(revision - self.first_revision, 0)
        self._history_bytes -= sum(map(_changes_bytes, self._history[:count]))
        del self._history[:count]

    def grant(self, lease: int, ttl_s: int) -> int:
        """Create a lease with this id. Returns its time to live in seconds, which may be longer than requested."""
        self._check_space(_LEASE_BYTES)
        if ttl_s > TTL_MAX_S:
            raise EtcdError(errors.OUT_OF_RANGE, "etcdserver: too large lease TTL")
        if lease in self._leases:
            raise EtcdError(errors.PRECONDITION, "etcdserver: lease already exists")
        ttl_s = max(ttl_s, TTL_MIN_S)
        self._leases[lease] = _Lease(ttl_s, self._now_s + ttl_s)
        self.idle_until_s = min(self.idle_until_s, self._now_s + ttl_s)
        return ttl_s

    def keep_alive(self, lease: int) -> int:
        """Renew the lease. Returns its time to live in seconds, 0 if there is no such lease."""
        if (found := self._leases.get(lease)) is None:
            return 0
        found.ends_s = self._now_s + found.ttl_s
        return found.ttl_s

    def revoke(self, lease: int) -> None:
        """Revoke a lease and delete its keys, at one revision."""
        if lease not in self._leases:
            raise EtcdError(*_LEASE_NOT_FOUND)
        keys = self._leases.pop(lease).keys
        self._write([Delete(key) for key in sorted(keys)])

    def set_time(self, now_s: float) -> None:
        """Set the time, on a monotonic clock of the caller. No lease expires yet."""
        self._now_s = now_s

    def end_leases(self) -> None:
        """Revoke the expired leases, each at its own revision, in the order of their expiry."""
        if self._now_s < self.idle_until_s:
            return
        for _, lease in sorted((it.ends_s, lease) for lease, it in self._leases.items() if it.ends_s <= self._now_s):
            self.revoke(lease)
        self.idle_until_s = min((lease.ends_s for lease in self._leases.values()), default=math.inf)

    def _keys_under(self, prefix: str) -> Sequence[str]:
        start = end = bisect_left(self._index, prefix)
        while end < len(self._index) and self._index[end].startswith(prefix):
            end += 1
        return self._index[start:end]

    def _holds(self, guard: TxnGuard) -> bool:
        match guard:
            case Absent(key):
                return key not in self._entries
            case Present(key):
                return key in self._entries
            case Unchanged(key, mod_revision):
                return key in self._entries and self._entries[key].mod_revision == mod_revision
            case Empty(prefix):
                return not self._keys_under(prefix)
            case NoneNewer(prefix, revision):
                return all(self._entries[key].mod_revision <= revision for key in self._keys_under(prefix))

    def _write(self, ops: Sequence[Op]) -> None:
        written: dict[str, KeyEntry | None] = {}
        for op in ops:
            match op:
                case Put(key, value, lease):
                    old = self._entries.get(key)
                    created = old.create_revision if old else self.revision + 1
                    written[key] = self._replace(key, KeyEntry(value, created, self.revision + 1, lease))
                case Delete(key, ""):
                    if key in self._entries:
                        written[key] = self._replace(key, None)
                case Delete(start, end):
                    for key in self._index[bisect_left(self._index, start) : bisect_left(self._index, end)]:
                        written[key] = self._replace(key, None)
        if not written:
            return
        self.revision += 1
        changes = Changes(self.revision, written)
        self._history.append(changes)
        self._history_bytes += _changes_bytes(changes)
        self.listener(changes)
        # With ten percent of slack, so that not every write compacts.
        if len(self._history) > self._history_revisions + self._history_revisions // 10:
            self.compact(self.revision + 1 - self._history_revisions)

    def _replace(self, key: str, entry: KeyEntry | None) -> KeyEntry | None:
        """Write a key, or delete it. Returns its new entry."""
        if old := self._entries.pop(key, None):
            self._entries_bytes -= _entry_bytes(key, old)
            if old.lease in self._leases:
                self._leases[old.lease].keys.discard(key)
            if entry is None:
                del self._index[bisect_left(self._index, key)]
        if entry:
            if old is None:
                insort(self._index, key)
            self._entries[key] = entry
            self._entries_bytes += _entry_bytes(key, entry)
            if entry.lease:
                self._leases[entry.lease].keys.add(key)
        return entry

    def _check_space(self, size: int) -> None:
        # History is dropped before a write is refused. A watch that loses its history is notified, and reads again.
        while self._is_full(size) and self._history:
            self.compact(self.revision + 1 - len(self._history) // 2)
        if self._is_full(size):
            raise EtcdError(errors.EXHAUSTED, "etcdserver: mvcc: database space exceeded")

    def _is_full(self, size: int) -> bool:
        held = self._entries_bytes + self._history_bytes + _LEASE_BYTES * len(self._leases)
        return held + size > self.quota_bytes


def _entry_bytes(key: str, entry: KeyEntry | None) -> int:
    return sys.getsizeof(key) + _ENTRY_BYTES + (sys.getsizeof(entry.value) if entry else 0)


def _changes_bytes(changes: Changes) -> int:
    return sum(_entry_bytes(key, entry) for key, entry in changes.entries.items())


def _checked_size(txn: Txn) -> int:
    """Bytes of the keys and values. Raises EtcdError for a transaction that etcd would reject."""
    size = sum(len(getattr(guard, "key", getattr(guard, "prefix", "")).encode(*_RAW)) for guard in txn.guards)
    for branch in (txn.then, txn.otherwise):
        puts = [op for op in branch if isinstance(op, Put)]
        deletes = [op for op in branch if isinstance(op, Delete)]
        size += sum(len(put.key.encode(*_RAW)) + len(put.value.encode(*_RAW)) for put in puts)
        if not all(op.key for op in branch):
            raise EtcdError(errors.INVALID, "etcdserver: key is not provided")
        deleted = (op.key <= put.key < op.end if op.end else put.key == op.key for op in deletes for put in puts)
        if len({put.key for put in puts}) < len(puts) or any(deleted):
            raise EtcdError(errors.INVALID, "etcdserver: duplicate key given in txn request")
    if max(len(txn.guards), len(txn.then), len(txn.otherwise)) > OPS_MAX:
        raise EtcdError(errors.INVALID, "etcdserver: too many operations in txn request")
    if size > REQUEST_BYTES_MAX:
        raise EtcdError(errors.INVALID, "etcdserver: request is too large")
    return size


# Keys and values may be bytes that are not UTF-8.
_RAW = ("utf-8", "surrogateescape")


_BATCH_REVISIONS = 100
# Watches are up to date after each call. A restart writes some five revisions, and an agent may restart for weeks.
_HISTORY_REVISIONS = 200


class MemoryStore:
    """A `Store` for one thread; it ends with its process.

    A call that writes updates all watches before it returns. Each watch gets every update in order, even if a watch's
    `notify` writes again. Leases end only in `advance`. Callers may read and compact `engine`, but not write to it.
    """

    def __init__(self) -> None:
        self.engine = Engine(history_revisions=_HISTORY_REVISIONS)
        self._watches: list[_Watch] = []
        self._notifying = False

    def check(self) -> str:
        return "in memory"

    def read(self, prefix: str) -> View:
        return self.engine.read(prefix)

    def commit(self, txn: Txn) -> TxnResponse:
        with _explained():
            response = self.engine.commit(txn)
        self._notify()
        return response

    def grant(self, lease: int, ttl_s: float) -> None:
        with _explained(errors.Kind.LEASE_EXISTS):
            self.engine.grant(lease, math.ceil(ttl_s))

    def keep_alive(self, lease: int) -> float:
        return float(self.engine.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        with _explained(errors.Kind.LEASE_GONE):
            self.engine.revoke(lease)
        self._notify()

    def watch(self, prefix: str, after: int | None, notify: Callable[[Update], None]) -> _Watch:
        # A store begins at revision 1, at which nothing is written.
        watch = _Watch(prefix, max(after or 0, 1) + 1, notify)
        if after is None:
            watch.view(self.read(prefix))
        self._watches.append(watch)
        self._notify()
        return watch

    def close(self) -> None:
        for watch in self._watches:
            watch.close()

    def advance(self, now_s: float) -> None:
        """Set the time to `now_s`, on the caller's clock, and revoke the expired leases."""
        self.engine.set_time(now_s)
        self.engine.end_leases()
        self._notify()

    def _notify(self) -> None:
        if self._notifying:
            # A watch's `notify` wrote something. The loop below, further up the stack, will deliver it.
            return
        self._notifying = True
        try:
            while behind := [watch for watch in self._watches if watch.next_revision <= self.engine.revision]:
                for watch in behind:
                    self._catch_up(watch)
                self._watches = [watch for watch in self._watches if not watch.closed]
        finally:
            self._notifying = False

    def _catch_up(self, watch: _Watch) -> None:
        history = self.engine.since(watch.next_revision, _BATCH_REVISIONS)
        if history is None:
            watch.view(self.read(watch.prefix))
        for changes in history or ():
            watch.deliver(changes)


@contextmanager
def _explained(passing: errors.Kind | None = None) -> Iterator[None]:
    """Raise the StoreError that a client of etcd would raise; an error of the kind `passing` is ignored."""
    try:
        yield
    except EtcdError as error:
        if errors.kind_of(error) is not passing:
            raise errors.explain(error, Endpoint("memory", 0), Access()) from None


class _Watch:
    """One watch, and the first revision that it has not delivered."""

    def __init__(self, prefix: str, next_revision: int, notify: Callable[[Update], None]) -> None:
        self.prefix = prefix
        self.next_revision = next_revision
        self.closed = False
        self._notify = notify

    def begun(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def deliver(self, changes: Changes) -> None:
        self.next_revision = changes.revision + 1
        if not self.closed and (seen := changes.under(self.prefix)):
            self._notify(seen)

    def view(self, view: View) -> None:
        self.next_revision = view.revision + 1
        if not self.closed:
            self._notify(view)
