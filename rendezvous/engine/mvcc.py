"""Keys and values in memory with their history: what each revision wrote, as etcd v3 keeps it (MVCC)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

# A range's `end` that means "to the last key", as in etcd's API.
UNBOUNDED = b"\0"
# Memory of one version of a key, without the key and the value: measured, and rounded up.
_VERSION_BYTES = 512


class Refused(Exception):
    """The engine refuses a request, with etcd's text; `code` is gRPC's status code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Compacted(Refused):
    """The requested revision is forgotten; `revision` is the first that is kept."""

    def __init__(self, revision: int) -> None:
        super().__init__(11, "etcdserver: mvcc: required revision has been compacted")
        self.revision = revision


class KeyValue(NamedTuple):
    """One write of one key; a deletion has version 0 and only the key and the revision. `lease` is 0 for none."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


class WrittenRevision(NamedTuple):
    """Everything that one revision wrote, in the order of the request."""

    revision: int
    events: tuple[KeyValue, ...]


def within(key: bytes, start: bytes, end: bytes) -> bool:
    """Whether `key` is in the range: only `start` if `end` is empty, else from `start` up to but without `end`."""
    if not end:
        return key == start
    return key >= start and (end == UNBOUNDED or key < end)


def prefix_end(prefix: bytes) -> bytes:
    """The `end` of the range of all keys that start with `prefix`, which is not empty."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else UNBOUNDED


class KeySpace:
    """The versions of all keys since the last compaction.

    Writes since the last `seal` are one transaction: they have the next revision, and reads see them at once.
    """

    def __init__(self) -> None:
        self.revision = 1
        # A fresh etcd has compacted nothing, not even revision 0.
        self.compacted = -1
        self.history_bytes = 0
        # About the memory that all versions take.
        self.held_bytes = 0
        self._versions: dict[bytes, list[KeyValue]] = {}
        self._index: list[bytes] = []
        self._history: list[WrittenRevision] = []
        self._open: list[KeyValue] = []

    @property
    def open_revision(self) -> int:
        """The revision that a read inside the transaction sees: the next one, once something was written."""
        return self.revision + 1 if self._open else self.revision

    @property
    def history_length(self) -> int:
        """How many revisions are remembered."""
        return len(self._history)

    def get(self, key: bytes) -> KeyValue | None:
        """The key as it is now."""
        versions = self._versions.get(key)
        return versions[-1] if versions and versions[-1].version else None

    def check(self, revision: int) -> None:
        """Raises Refused for a revision that cannot be read; 0 is now."""
        if revision > self.revision:
            raise Refused(11, "etcdserver: mvcc: required revision is a future revision")
        if 0 < revision < self.compacted:
            raise Compacted(self.compacted)

    def range(self, start: bytes, end: bytes = b"", revision: int = 0) -> list[KeyValue]:
        """The keys of a range in order, as they are now or were at `revision`. Call `check(revision)` before."""
        if revision <= 0 or revision >= self.open_revision:
            found = [self._versions[key][-1] for key in self._between(start, end)]
        else:
            found = [kv for key in self._between(start, end) if (kv := self._at(key, revision))]
        return [kv for kv in found if kv.version]

    def put(self, key: bytes, value: bytes, lease: int) -> KeyValue | None:
        """Write a key. Returns what it was before."""
        old = self.get(key)
        revision = self.revision + 1
        created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
        self._write(KeyValue(key, value, created, revision, version, lease))
        return old

    def delete(self, start: bytes, end: bytes = b"") -> list[KeyValue]:
        """Delete a range. Returns what was there."""
        gone = self.range(start, end)
        for old in gone:
            self._write(KeyValue(old.key, b"", 0, self.revision + 1, 0, 0))
        return gone

    def seal(self) -> WrittenRevision | None:
        """End the transaction. Returns what it wrote, or None."""
        if not self._open:
            return None
        self.revision += 1
        written = WrittenRevision(self.revision, tuple(self._open))
        self._open.clear()
        self._history.append(written)
        self.history_bytes += _size(written)
        return written

    def since(self, revision: int, count_max: int) -> Sequence[WrittenRevision]:
        """At most `count_max` revisions in order, beginning with `revision`. Raises Compacted."""
        if revision < self.compacted:
            raise Compacted(self.compacted)
        first = max(revision - self._first, 0)
        return self._history[first : first + count_max]

    def compact(self, revision: int) -> None:
        """Forget the history before `revision`. Raises Refused if it is forgotten already, or not yet written."""
        if revision <= self.compacted:
            raise Compacted(self.compacted)
        if revision > self.revision:
            raise Refused(11, "etcdserver: mvcc: required revision is a future revision")
        past = self._history[: max(revision + 1 - self._first, 0)]
        self.compacted = revision
        for key in {event.key for written in past for event in written.events}:
            # The last compaction pruned keys that its own revision deleted; that revision is still in the history.
            if key in self._versions:
                self._prune(key)
        # Watches can still begin at `revision` itself.
        forgotten = [written for written in past if written.revision < revision]
        del self._history[: len(forgotten)]
        self.history_bytes -= sum(map(_size, forgotten))

    @property
    def _first(self) -> int:
        return self.revision + 1 - len(self._history)

    def _between(self, start: bytes, end: bytes) -> Sequence[bytes]:
        if not end:
            return (start,) if start in self._versions else ()
        first = bisect_left(self._index, start)
        last = len(self._index) if end == UNBOUNDED else bisect_left(self._index, end)
        return self._index[first:last]

    def _at(self, key: bytes, revision: int) -> KeyValue | None:
        return next((kv for kv in reversed(self._versions[key]) if kv.mod_revision <= revision), None)

    def _write(self, kv: KeyValue) -> None:
        versions = self._versions.get(kv.key)
        if versions is None:
            self._versions[kv.key] = [kv]
            insort(self._index, kv.key)
        else:
            versions.append(kv)
        self._open.append(kv)
        self.held_bytes += _held(kv)

    def _prune(self, key: bytes) -> None:
        versions = self._versions[key]
        old = 0
        while old < len(versions) - 1 and versions[old + 1].mod_revision <= self.compacted:
            old += 1
        if not versions[old].version and versions[old].mod_revision <= self.compacted:
            old += 1
        self.held_bytes -= sum(map(_held, versions[:old]))
        del versions[:old]
        if not versions:
            del self._versions[key]
            del self._index[bisect_left(self._index, key)]


def _held(kv: KeyValue) -> int:
    return len(kv.key) + len(kv.value) + _VERSION_BYTES


def _size(written: WrittenRevision) -> int:
    return sum(len(event.key) + len(event.value) for event in written.events)
