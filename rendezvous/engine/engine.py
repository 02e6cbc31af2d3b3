"""etcd v3 in memory: the part of its API that a rendezvous uses, without a network and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elaunch.rendezvous.engine.leases import LeaseNotFound, Leases
from elaunch.rendezvous.engine.mvcc import UNBOUNDED, KeySpace, KeyValue, Refused, WrittenRevision, within
from elaunch.rendezvous.engine.request_sizes import (
    LOG_BYTES,
    MESSAGE_BYTES_MAX,
    REQUEST_BYTES_MAX,
    request_bytes,
    txn_bytes,
)
from elaunch.rendezvous.engine.requests import (
    Compare,
    DeleteAnswer,
    DeleteRequest,
    OpAnswer,
    OpRequest,
    PutAnswer,
    PutRequest,
    RangeAnswer,
    RangeRequest,
    Result,
    Target,
    TxnAnswer,
    TxnRequest,
)

OPS_MAX = 128
HISTORY_REVISIONS = 10_000
HISTORY_BYTES = 64 << 20
# Memory of all keys, their history and the leases. This process runs on the head, where the workers need the memory.
QUOTA_BYTES = 256 << 20
_LEASE_BYTES = 1024
# etcd's minimum at its default election timeout.
TTL_MIN_S = 2


class Engine:
    """One etcd's keys and leases.

    Every method that takes a request may raise `Refused`; then it has changed nothing. Leases end only in `end_leases`.
    About the last `history_revisions` revisions can be read and watched, fewer if they hold more than `history_bytes`.
    A put or a grant that would take more than `quota_bytes` of memory is refused. Deleting a key makes room at once; a
    real etcd must be compacted first, and its alarm disarmed.
    """

    def __init__(
        self,
        *,
        history_revisions: int = HISTORY_REVISIONS,
        history_bytes: int = HISTORY_BYTES,
        quota_bytes: int = QUOTA_BYTES,
        ttl_min_s: int = TTL_MIN_S,
    ) -> None:
        self._told: Callable[[WrittenRevision], None] = lambda written: None
        self._history_revisions = history_revisions
        self._history_bytes = history_bytes
        self._quota_bytes = quota_bytes
        self._keys = KeySpace()
        self._leases = Leases(ttl_min_s)
        self._now_s = 0.0

    @property
    def revision(self) -> int:
        return self._keys.revision

    def listen(self, told: Callable[[WrittenRevision], None]) -> None:
        """From now on, call `told` with each new revision, before the write that made it is answered."""
        self._told = told

    def range(self, request: RangeRequest) -> RangeAnswer:
        _check_message(request_bytes(request))
        _check(request)
        self._keys.check(request.revision)
        return self._range(request)

    def put(self, request: PutRequest) -> PutAnswer:
        size = request_bytes(request)
        _check_message(size)
        self._check_room(size)
        _check(request)
        _check_logged(size)
        self._check_lease(request)
        answer = self._put(request)
        self._seal()
        return answer

    def delete(self, request: DeleteRequest) -> DeleteAnswer:
        size = request_bytes(request)
        _check_message(size)
        _check(request)
        _check_logged(size)
        answer = self._delete(request)
        self._seal()
        return answer

    def txn(self, request: TxnRequest) -> TxnAnswer:
        """Run one branch, at one revision: `success` if every comparison is true, else `failure`."""
        size = txn_bytes(request)
        _check_message(size)
        ops = (*request.success, *request.failure)
        if any(isinstance(op, PutRequest) for op in ops):
            self._check_room(size)
        _check_txn(request)
        if not all(isinstance(op, RangeRequest) for op in ops):
            _check_logged(size)
        succeeded = all(map(self._is_true, request.compare))
        branch = request.success if succeeded else request.failure
        # In etcd's order, and before anything is written: a write would make one more revision readable.
        for op in branch:
            if isinstance(op, PutRequest):
                self._check_lease(op)
        for op in branch:
            if isinstance(op, RangeRequest):
                self._keys.check(op.revision)
        answers = tuple(map(self._do, branch))
        self._seal()
        return TxnAnswer(self.revision, succeeded, answers)

    def compact(self, revision: int) -> int:
        """Forget the history before `revision`. Returns the store's revision."""
        self._keys.compact(revision)
        return self.revision

    def since(self, revision: int, revisions_max: int) -> Sequence[WrittenRevision]:
        """At most `revisions_max` revisions in order, beginning with `revision`.

        Raises Compacted if the history no longer has them.
        """
        return self._keys.since(revision, revisions_max)

    def grant(self, lease: int, ttl_s: int) -> tuple[int, int]:
        """Create a lease; the engine chooses the id if `lease` is 0. Returns the id and the time to live in seconds."""
        self._check_room(_LEASE_BYTES)
        return self._leases.grant(lease, ttl_s, self._now_s)

    def keep_alive(self, lease: int) -> int:
        """Renew the lease. Returns the seconds that it now has, 0 if it has ended."""
        return self._leases.renew(lease, self._now_s) if lease in self._leases else 0

    def time_to_live(self, lease: int) -> tuple[int, int, Sequence[bytes]]:
        """A lease's remaining whole seconds, its granted seconds and its keys; (-1, 0, ()) if it has ended."""
        if lease not in self._leases:
            return -1, 0, ()
        found = self._leases.find(lease)
        return int(found.ends_s - self._now_s), found.ttl_s, sorted(found.keys)

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys, at one revision."""
        for key in self._leases.end(lease):
            self._keys.delete(key)
        self._seal()

    @property
    def idle_until_s(self) -> float:
        """No lease ends before this time."""
        return self._leases.soonest_s

    def tell_time(self, now_s: float) -> None:
        """Set the time to `now_s`, on a clock of the caller that never goes back. No lease ends yet."""
        self._now_s = now_s

    def end_leases(self) -> None:
        """End the leases whose time is over, each at its own revision."""
        for lease in self._leases.due(self._now_s):
            self.revoke(lease)

    def _do(self, request: OpRequest) -> OpAnswer:
        match request:
            case RangeRequest():
                return self._range(request)
            case PutRequest():
                return self._put(request)
            case DeleteRequest():
                return self._delete(request)

    def _range(self, request: RangeRequest) -> RangeAnswer:
        kvs: Sequence[KeyValue] = self._keys.range(request.key, request.end, request.revision)
        total = len(kvs)
        more = 0 < request.limit < total and not request.count_only
        if more:
            kvs = kvs[: request.limit]
        if request.count_only:
            kvs = ()
        elif request.keys_only:
            kvs = [kv._replace(value=b"") for kv in kvs]
        return RangeAnswer(self._keys.open_revision, kvs, more, total)

    def _put(self, request: PutRequest) -> PutAnswer:
        old = self._keys.put(request.key, request.value, request.lease)
        self._leases.move(request.key, old.lease if old else 0, request.lease)
        return PutAnswer(self._keys.open_revision, old if request.prev_kv else None)

    def _delete(self, request: DeleteRequest) -> DeleteAnswer:
        gone = self._keys.delete(request.key, request.end)
        for old in gone:
            self._leases.move(old.key, old.lease, 0)
        return DeleteAnswer(self._keys.open_revision, len(gone), gone if request.prev_kv else ())

    def _seal(self) -> None:
        written = self._keys.seal()
        if not written:
            return
        self._told(written)
        kept = self._keys.history_length
        # With ten percent of slack, so that not every write compacts.
        if kept > self._history_revisions + self._history_revisions // 10:
            self._keys.compact(self.revision - self._history_revisions)
        elif kept > 1 and self._keys.history_bytes > self._history_bytes:
            self._keys.compact(self.revision - kept // 2)

    def _check_room(self, size: int) -> None:
        # History is dropped before a write is refused. A watch that loses its history is told so, and reads again.
        while self._is_full(size) and (kept := self._keys.history_length) > 1:
            self._keys.compact(self.revision - (kept - 1) // 2)
        if self._is_full(size):
            raise Refused(8, "etcdserver: mvcc: database space exceeded")

    def _is_full(self, size: int) -> bool:
        return self._keys.held_bytes + _LEASE_BYTES * len(self._leases) + size > self._quota_bytes

    def _check_lease(self, request: PutRequest) -> None:
        if request.lease and request.lease not in self._leases:
            raise LeaseNotFound

    def _is_true(self, compare: Compare) -> bool:
        kvs = self._keys.range(compare.key, compare.end)
        if not kvs:
            # A missing key has no value, so no comparison of its value is true. All its numbers are 0.
            return compare.target is not Target.VALUE and _compares(compare, 0)
        return all(_compares(compare, _subject(compare.target, kv)) for kv in kvs)


def _subject(target: Target, kv: KeyValue) -> bytes | int:
    match target:
        case Target.VERSION:
            return kv.version
        case Target.CREATE:
            return kv.create_revision
        case Target.MOD:
            return kv.mod_revision
        case Target.VALUE:
            return kv.value
        case Target.LEASE:
            return kv.lease


def _compares(compare: Compare, subject: bytes | int) -> bool:
    match compare.result:
        case Result.EQUAL:
            return subject == compare.value
        case Result.NOT_EQUAL:
            return subject != compare.value
        case Result.GREATER:
            return subject > compare.value  # type: ignore[operator]
        case Result.LESS:
            return subject < compare.value  # type: ignore[operator]


def _check_message(size: int) -> None:
    """Raises Refused with the text of etcd's gRPC. The code is the same as for a full store."""
    if size > MESSAGE_BYTES_MAX:
        raise Refused(8, f"grpc: received message larger than max ({size} vs. {MESSAGE_BYTES_MAX})")


def _check_logged(size: int) -> None:
    if size + LOG_BYTES > REQUEST_BYTES_MAX:
        raise Refused(3, "etcdserver: request is too large")


def _check(request: OpRequest | Compare) -> None:
    if not request.key:
        raise Refused(3, "etcdserver: key is not provided")


def _check_txn(request: TxnRequest) -> None:
    if max(len(request.compare), len(request.success), len(request.failure)) > OPS_MAX:
        raise Refused(3, "etcdserver: too many operations in txn request")
    for part in (*request.compare, *request.success, *request.failure):
        _check(part)
    for branch in (request.success, request.failure):
        _check_written_once(branch)


def _check_written_once(branch: Sequence[OpRequest]) -> None:
    puts = [op.key for op in branch if isinstance(op, PutRequest)]
    # As in etcd, a range without an end is not checked.
    deletes = [op for op in branch if isinstance(op, DeleteRequest) and op.end != UNBOUNDED]
    if len(set(puts)) < len(puts) or any(within(key, op.key, op.end) for key in puts for op in deletes):
        raise Refused(3, "etcdserver: duplicate key given in txn request")
