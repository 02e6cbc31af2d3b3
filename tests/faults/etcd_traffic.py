"""Asks of a store all the time what an agent asks of it, and tells afterwards what went wrong."""

from __future__ import annotations

import threading
import time

from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.store import Absent, Changes, LeaseGone, Present, Put, Txn, Unavailable, Update
from tests.etcd import answered
from tests.harness import joined, wait_for

PREFIX = "/elaunch/traffic/"
LEASED = f"{PREFIX}leased"
LEASE = 4711
KEEPALIVE_S = 0.5


class Traffic:
    """Writes, one by one, a watch on them, and a lease with a key, through one store; use it as a context manager.

    `gaps_s` are the times between two answered writes. `told` is what the watch reported. `unavailable` are the
    messages of failed calls. The caller closes the store.
    """

    def __init__(self, store: EtcdStore, ttl_s: float = 5.0, *, keep_alive: bool = True) -> None:
        self.store = store
        self.told: list[Update] = []
        self.gaps_s: list[float] = []
        self.unavailable: list[str] = []
        self.written = 0
        self.lease_gone = False
        self.started = answered(lambda: store.read(PREFIX)).revision
        self._stop = threading.Event()
        answered(lambda: store.grant(LEASE, ttl_s))
        # The write may have been done although its answer was lost.
        answered(lambda: store.commit(Txn((Absent(LEASED),), (Put(LEASED, "", LEASE),))))
        assert LEASED in answered(lambda: store.read(LEASED)).entries
        self._watch = store.watch(PREFIX, self.started, self.told.append)
        self._threads = [threading.Thread(target=self._write)]
        if keep_alive:
            self._threads.append(threading.Thread(target=self._keep_alive))

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.wait_for_writes(5)
        return self

    def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        joined(*self._threads)
        try:
            if exception is None:
                self.wait_until_told()
        finally:
            self._watch.close()

    def wait_for_writes(self, count: int) -> None:
        """Wait until `count` more writes have been answered and the watch has reported them."""
        wanted = self.written + count
        wait_for(lambda: self.written >= wanted, f"{count} more writes")
        self.wait_until_told()

    def wait_until_told(self) -> None:
        """Wait until the watch has reported all writes up to now."""
        revision = answered(lambda: self.store.read(PREFIX)).entries
        newest = max(entry.mod_revision for entry in revision.values())
        wait_for(lambda: self._told_until() >= newest, f"word of revision {newest}; told until {self._told_until()}")

    def assert_nothing_was_lost_or_repeated(self, fresh: EtcdStore) -> None:
        """Check that the watch reported the same as a new client's watch on the same history. The traffic has ended."""
        history: list[Update] = []
        watch = fresh.watch(PREFIX, self.started, history.append)
        last = self._told_until()
        wait_for(lambda: history and isinstance(history[-1], Changes) and history[-1].revision >= last, "the history")
        watch.close()
        told = [update for update in self.told if isinstance(update, Changes)]
        assert told == self.told
        assert [update for update in history if isinstance(update, Changes)][: len(told)] == told
        assert len(told) >= self.written

    def assert_the_lease_is_kept(self) -> None:
        assert not self.lease_gone
        assert answered(lambda: self.store.commit(Txn((Present(LEASED),)))).held
        first = self.told[0]
        assert isinstance(first, Changes)
        entry = answered(lambda: self.store.read(LEASED)).entries[LEASED]
        assert entry.create_revision == first.revision, "the key was made anew"

    def _told_until(self) -> int:
        newest = self.told[-1] if self.told else None
        return newest.revision if isinstance(newest, Changes) else 0

    def _write(self) -> None:
        answered_s = time.monotonic()
        while not self._stop.is_set():
            try:
                self.store.commit(Txn((), (Put(f"{PREFIX}n", str(self.written)),)))
            except Unavailable as error:
                self.unavailable.append(str(error))
                self._stop.wait(0.02)
                continue
            now_s = time.monotonic()
            self.gaps_s.append(now_s - answered_s)
            answered_s = now_s
            self.written += 1
            self._stop.wait(0.02)

    def _keep_alive(self) -> None:
        while not self._stop.wait(KEEPALIVE_S):
            try:
                if not self.store.keep_alive(LEASE):
                    self.lease_gone = True
            except (Unavailable, LeaseGone) as error:
                self.unavailable.append(str(error))
