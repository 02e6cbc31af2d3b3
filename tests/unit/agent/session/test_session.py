"""agent.session.session: a thread of its own makes all requests in order, and repeats each until the store answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from elaunch.agent.core.events import Committed, Leased, SnapshotChanged, SnapshotPending, StoreBack, StoreEvent, Tag
from elaunch.agent.session.session import Session
from elaunch.agent.session.store_view import JobStore, LocalHost
from elaunch.rendezvous.rules.snapshot import Keys
from elaunch.rendezvous.store import Absent, Delete, Put, Txn, TxnResponse, Unavailable
from elaunch.rendezvous.times import Times
from tests.harness import DEADLINE_S, joined, wait_for
from tests.unit.rendezvous.flaky_store import FlakyStore

KEYS = Keys("job")
# Short enough for many tries, and with leases that no test outlives.
TIMES = replace(Times(), backoff_max_s=0.02, keepalive_s=0.01, lease_ttl_s=60)
FLUSH_S = DEADLINE_S
AWAY = Unavailable("no route")


class Bench:
    """A session with a store that fails as it is told; `events` came by `post`."""

    def __init__(self, *, remote: bool, store: FlakyStore | None = None) -> None:
        self.store = store or FlakyStore()
        self.events: list[StoreEvent] = []
        self.looks_due = 0
        self.session = Session(JobStore(self.store, KEYS, remote), LocalHost("node-a"), TIMES, self._post)

    @property
    def lease(self) -> int:
        leased = [event for event in self.events if isinstance(event, Leased)]
        return leased[-1].lease

    def seen(self, kind: type[StoreEvent]) -> list[StoreEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[StoreEvent], count: int = 1) -> StoreEvent:
        wait_for(lambda: len(self.seen(kind)) >= count, f"{count} times {kind.__name__}, {self.events}")
        return self.seen(kind)[count - 1]

    def put(self, number: int) -> Txn:
        """A write that can happen once."""
        return Txn((Absent(f"{KEYS.root}n/{number}"),), (Put(f"{KEYS.root}n/{number}", "x"),))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the writes that happened, in the store's order."""
        entries = self.store.read(f"{KEYS.root}n/").entries
        by_age = sorted(entries, key=lambda key: entries[key].create_revision)
        return [int(key.rpartition("/")[2]) for key in by_age]

    def _post(self, event: StoreEvent | SnapshotPending) -> None:
        if isinstance(event, SnapshotPending):
            self.looks_due += 1
        else:
            self.events.append(event)


@contextmanager
def session(*, remote: bool = True, store: FlakyStore | None = None) -> Iterator[Bench]:
    bench = Bench(remote=remote, store=store)
    try:
        bench.session.open()
        yield bench
    finally:
        bench.store.down = ""
        bench.session.close(FLUSH_S)


# --- a store in this process


def test_a_store_in_this_process_serves_requests_in_the_callers_thread() -> None:
    before = set(threading.enumerate())
    with session(remote=False) as bench:
        assert bench.looks_due == 1
        snapshot_changed = bench.session.snapshot()
        bench.session.commit(bench.put(1), Tag.JOIN)

        assert bench.looks_due == 2
        assert set(threading.enumerate()) <= before
        assert bench.store.threads == {threading.current_thread().name}

    assert isinstance(snapshot_changed, SnapshotChanged)
    assert snapshot_changed.snapshot.whole
    assert [type(event) for event in bench.events] == [Leased, Committed]
    assert bench.store.closed


# --- a store elsewhere


class SlowStore(FlakyStore):
    """A store whose commits wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def commit(self, txn: Txn) -> TxnResponse:
        assert self.go.wait(FLUSH_S)
        return super().commit(txn)


def test_whoever_orders_never_waits_for_the_store() -> None:
    store = SlowStore()
    with session(store=store) as bench:
        bench.wait_for(Leased)

        for number in range(5):
            bench.session.commit(bench.put(number), Tag.JOIN)
        bench.session.widen()
        bench.session.tick(1e9)
        answered = len(bench.seen(Committed))
        store.go.set()
        bench.wait_for(Committed, 5)

    assert answered == 0


def test_a_lease_is_renewed_only_by_a_loop_that_lives() -> None:
    with session() as bench:
        bench.wait_for(StoreBack)
        due_s = bench.session.due_s
        assert due_s is not None
        bench.session.commit(bench.put(1), Tag.JOIN)
        bench.wait_for(Committed)
        untouched = bench.store.calls["keep_alive"]

        bench.session.tick(due_s - 0.001)
        bench.session.commit(bench.put(2), Tag.JOIN)
        bench.wait_for(Committed, 2)
        early = bench.store.calls["keep_alive"]
        bench.session.tick(due_s)
        wait_for(lambda: bench.store.calls["keep_alive"], "a renewal")

    assert (untouched, early) == (0, 0)


# --- the end


def test_pending_writes_are_flushed_and_the_lease_is_revoked() -> None:
    bench = Bench(remote=True)
    bench.session.open()
    bench.wait_for(StoreBack)
    mine = Txn((), (Put(KEYS.member("node-a-00000001"), "{}", bench.lease),))

    bench.session.commit(mine, None)
    for number in range(20):
        bench.session.commit(bench.put(number), None)
    bench.session.close(FLUSH_S)

    assert bench.numbers == list(range(20))
    assert not bench.store.read(KEYS.members).entries
    assert bench.store.calls["revoke"] == 1
    assert bench.store.closed
    assert bench.session.due_s is None


@pytest.mark.parametrize("others_go", [False, True])
def test_a_store_that_ends_with_this_agent_stays_for_the_other_members_but_not_for_ever(others_go: bool) -> None:
    bench = Bench(remote=True)
    bench.session.open()
    bench.wait_for(StoreBack)
    bench.store.write(Txn((), (Put(KEYS.member("node-b-00000001"), "{}"),)))
    closed = threading.Event()
    outlast_s = 1e6 if others_go else 0.05

    closing = threading.Thread(target=lambda: (bench.session.close(FLUSH_S, outlast_s), closed.set()))
    closing.start()
    if others_go:
        wait_for(lambda: bench.store.calls["revoke"], "its own lease to be given back")
        waited = not closed.is_set()
        bench.store.write(Txn((), (Delete(KEYS.member("node-b-00000001")),)))
        assert waited

    assert closed.wait(FLUSH_S)
    joined(closing)
