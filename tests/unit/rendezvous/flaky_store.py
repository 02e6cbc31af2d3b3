"""A real store in memory with failures that tests set."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.store import StoreError, Txn, TxnResponse, Unavailable, Update, View, Watch

Result = TypeVar("Result")


class _FlakyWatch:
    """A watch that has begun once a read was answered."""

    def __init__(self, store: FlakyStore, watch: Watch) -> None:
        self._store = store
        self._watch = watch

    def begun(self) -> None:
        try:
            self._store._call("begun", lambda: self._store.read(""))
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        self._watch.close()


class FlakyStore:
    """A memory store that several threads may use, and that fails on request.

    `errors[method]` are raised one by one, before the call does anything. `lost[method]` are raised after the call did
    its work, as if the answer were lost. `down` fails every call. `calls` counts the calls. `committed` are the
    transactions that happened, in order. `between` is called after each read, before its answer. `deaf` watches report
    nothing any more.
    """

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.errors: dict[str, list[StoreError]] = {}
        self.lost: dict[str, list[StoreError]] = {}
        self.down = ""
        self.calls: Counter[str] = Counter()
        self.committed: list[Txn] = []
        self.between: Callable[[], None] = lambda: None
        self.deaf = False
        self.closed = False
        self.threads: set[str] = set()
        self._lock = threading.RLock()

    def check(self) -> None:
        self._call("check", lambda: None)

    def read(self, prefix: str) -> View:
        view = self._call("read", lambda: self.memory.read(prefix))
        self.between()
        return view

    def commit(self, txn: Txn) -> TxnResponse:
        def commit() -> TxnResponse:
            answer = self.memory.commit(txn)
            self.committed.append(txn)
            return answer

        return self._call("commit", commit)

    def grant(self, lease: int, ttl_s: float) -> None:
        self._call("grant", lambda: self.memory.grant(lease, ttl_s))

    def keep_alive(self, lease: int) -> float:
        return self._call("keep_alive", lambda: self.memory.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        self._call("revoke", lambda: self.memory.revoke(lease))

    def watch(self, prefix: str, after: int | None, notify: Callable[[Update], None]) -> Watch:
        def filtered(update: Update) -> None:
            if not self.deaf and not self.errors.get("begun"):
                notify(update)

        return self._call("watch", lambda: _FlakyWatch(self, self.memory.watch(prefix, after, filtered)))

    def close(self) -> None:
        self.closed = True

    # For tests.

    def write(self, txn: Txn) -> TxnResponse:
        """Commit a transaction of another client."""
        with self._lock:
            return self.memory.commit(txn)

    def fail(self, method: str, *errors: StoreError) -> None:
        self.errors.setdefault(method, []).extend(errors)

    def lose(self, method: str, *errors: StoreError) -> None:
        self.lost.setdefault(method, []).extend(errors)

    def _call(self, method: str, call: Callable[[], Result]) -> Result:
        with self._lock:
            self.calls[method] += 1
            self.threads.add(threading.current_thread().name)
            if self.down:
                raise Unavailable(self.down)
            if self.errors.get(method):
                raise self.errors[method].pop(0)
            answer = call()
            if self.lost.get(method):
                raise self.lost[method].pop(0)
            return answer
