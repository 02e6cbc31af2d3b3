"""The store in this process's memory: for jobs on one node, where the agent is the only client, and for simulations."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.engine.engine import Compacted, Engine, LeaseExists, LeaseNotFound, Refused
from elaunch.rendezvous.etcd.errors import explain
from elaunch.rendezvous.etcd.transport import EtcdError
from elaunch.rendezvous.store import Answer, Changes, Txn, Update, View

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

    def read(self, prefix: str) -> View:
        return self.engine.read(prefix)

    def commit(self, txn: Txn) -> Answer:
        try:
            answer = self.engine.commit(txn)
        except Refused as refused:
            # As a client of etcd would.
            error = EtcdError(refused.code, refused.message)
            raise explain(error, Endpoint("memory", 0), Access()) from None
        self._tell()
        return answer

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
            for changes in self.engine.since(watch.next_revision, _BATCH_REVISIONS):
                watch.told(changes)
        except Compacted:
            watch.view(self.read(watch.prefix))


class _Watch:
    """One watch, and the first revision that it has not delivered."""

    def __init__(self, prefix: str, next_revision: int, tell: Callable[[Update], None]) -> None:
        self.prefix = prefix
        self.next_revision = next_revision
        self.closed = False
        self._tell = tell

    def begun(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def told(self, changes: Changes) -> None:
        self.next_revision = changes.revision + 1
        if not self.closed and (seen := changes.under(self.prefix)):
            self._tell(seen)

    def view(self, view: View) -> None:
        self.next_revision = view.revision + 1
        if not self.closed:
            self._tell(view)
