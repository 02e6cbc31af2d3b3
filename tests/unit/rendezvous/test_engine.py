"""rendezvous.engine: the store's contract, bounds of its history and its memory, and its leases' time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from elaunch.rendezvous.engine import Engine, MemoryStore
from elaunch.rendezvous.etcd.transport import EtcdError
from elaunch.rendezvous.store import Absent, Changes, Delete, Put, Txn, Update
from tests.harness import RUN_LIMIT_S
from tests.unit.rendezvous.store_contract import LONG_TTL_S, ROOT, Received, StoreContract, new_lease, put


def write(engine: Engine, key: str, value: str = "", lease: int = 0) -> None:
    engine.commit(Txn((), (Put(key, value, lease),)))


def delete(engine: Engine, key: str, end: str = "") -> None:
    engine.commit(Txn((), (Delete(key, end),)))


def remembered(engine: Engine) -> list[int]:
    """The revisions that the history has, from the oldest."""
    return [changes.revision for changes in engine.since(engine.first_revision, 10**9) or ()]


def test_the_history_keeps_the_last_revisions_and_forgets_the_rest() -> None:
    engine = Engine(history_revisions=100)
    lengths = []

    for _ in range(1000):
        write(engine, "key")
        lengths.append(len(remembered(engine)))

    assert remembered(engine)[-1] == engine.revision == 1001
    assert min(lengths[200:]) >= 100
    assert max(lengths) <= 110


def test_what_the_revision_of_the_compaction_itself_wrote_is_still_delivered() -> None:
    """Its deletions too, which etcd 3.4.23 and 3.5.1 lose."""
    engine = Engine()
    write(engine, "key")
    delete(engine, "key")

    engine.compact(3)

    assert engine.since(3, 10) == [Changes(3, {"key": None})]
    assert engine.since(2, 10) is None


def test_a_refused_transaction_leaves_no_trace() -> None:
    engine, received = Engine(), list[Changes]()
    engine.listener = received.append

    with pytest.raises(EtcdError, match="lease not found"):
        engine.commit(Txn((), (Put("a", ""), Put("b", "", lease=5))))

    assert not engine.read("").entries
    assert received == []


def test_a_lease_ends_at_its_time_and_not_before() -> None:
    engine = Engine()
    engine.set_time(100.0)
    engine.grant(7, 5)
    write(engine, "key", lease=7)

    engine.set_time(104.9)
    engine.end_leases()
    before = len(engine.read("").entries)
    assert engine.idle_until_s == 105.0
    engine.set_time(105.0)
    engine.end_leases()

    assert (before, len(engine.read("").entries)) == (1, 0)
    assert engine.keep_alive(7) == 0
    assert engine.idle_until_s == float("inf")


def test_a_lease_that_was_renewed_meanwhile_does_not_keep_others_from_ending() -> None:
    engine = Engine()
    engine.grant(7, 5)
    engine.grant(8, 7)
    engine.set_time(4.0)
    engine.keep_alive(7)

    for now_s in (5.0, 7.0):
        engine.set_time(now_s)
        engine.end_leases()

    assert (engine.keep_alive(7), engine.keep_alive(8)) == (5, 0)


# Memory.


@pytest.fixture
def small() -> Engine:
    """With room for about ten values of 10 kB."""
    return Engine(quota_bytes=110_000)


def test_a_full_engine_reads_and_deletes_and_has_room_again_at_once(small: Engine) -> None:
    with suppress(EtcdError):
        for number in range(20):
            write(small, f"{number:05}", "x" * 10_000)
    assert 5 < len(small.read("").entries) < 11

    delete(small, "00001")

    write(small, "new", "x" * 10_000)
    with pytest.raises(EtcdError, match="space exceeded"):
        write(small, "newer", "x" * 10_000)


def test_the_past_is_forgotten_before_the_present_is_refused(small: Engine) -> None:
    for turn in range(1000):
        write(small, "key", f"{turn}" + "x" * 10_000)

    assert small.read("").entries["key"].value.startswith("999x")


def test_nothing_is_held_once_all_is_deleted_and_forgotten(small: Engine) -> None:
    for turn in range(2000):
        write(small, f"{turn * 7 % 23}", "x" * (turn % 50)) if turn % 3 else delete(small, f"{turn * 7 % 23}", "5")
        if turn % 100 == 50:
            small.compact(small.revision - 3)
    delete(small, "0", "a")
    small.compact(small.revision + 1)

    assert (small._entries_bytes, small._history_bytes, small._entries, small._index) == (0, 0, {}, [])


def test_leases_take_room_and_empty_transactions_do_not() -> None:
    engine = Engine(quota_bytes=100_000)

    for number in range(1, 98):
        engine.grant(number, 60)
    with pytest.raises(EtcdError, match="space exceeded"):
        engine.grant(98, 60)
    assert engine.commit(Txn(())).held
    engine.revoke(1)

    engine.grant(1000, 60)


# What a full engine of 16 MiB adds to a process, beside a history that is full too.
MEASURE = """
import sys
from pathlib import Path
from elaunch.rendezvous.engine import Engine
from elaunch.rendezvous.etcd.transport import EtcdError
from elaunch.rendezvous.store import Put, Txn

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

engine, size, count, before = Engine(quota_bytes=16 << 20), int(sys.argv[1]), 0, resident()
try:
    while True:
        engine.commit(Txn((), (Put(f"{count:09}", chr(65 + count % 50) * size),)))
        count += 1
except EtcdError:
    print(resident() - before)
"""


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_a_full_store_holds_about_its_quota_of_memory(size: int) -> None:
    held = subprocess.run(
        [sys.executable, "-c", MEASURE, str(size)], stdout=subprocess.PIPE, check=True, timeout=RUN_LIMIT_S
    )

    assert 0.5 < int(held.stdout) / (16 << 20) < 1.25


A, B = f"{ROOT}a", f"{ROOT}b"


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def compact(self, store: MemoryStore) -> Callable[[int], None]:
        return store.engine.compact

    @pytest.fixture
    def elapse(self, store: MemoryStore) -> Callable[[float], None]:
        now_s = 0.0

        def passed(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds
            store.advance(now_s)

        return passed


def test_watches_are_notified_before_the_call_that_writes_returns() -> None:
    store, received = MemoryStore(), Received()
    store.watch(ROOT, store.read(ROOT).revision, received)
    lease = new_lease(store)
    counts = []

    store.commit(Txn((), (Put(A, "1", lease),)))
    counts.append(len(received.updates))
    store.revoke(lease)
    counts.append(len(received.updates))
    store.commit(Txn((), (Put(A, "2", new_lease(store)),)))
    store.advance(LONG_TTL_S)
    counts.append(len(received.updates))

    assert counts == [1, 2, 4]


def test_a_callback_may_write_and_every_watch_still_gets_each_revision_in_order() -> None:
    store, second = MemoryStore(), Received()
    before = store.read(ROOT).revision
    first: list[Update] = []

    def answer(update: Update) -> None:
        first.append(update)
        store.commit(Txn((Absent(B),), (Put(B, "answer"),)))

    store.watch(ROOT, before, answer)
    store.watch(ROOT, before, second)

    put(store, A, "question")

    assert second.values_until(before + 2) == [(before + 1, {A: "question"}), (before + 2, {B: "answer"})]
    assert first == second.updates


def test_a_watch_may_be_closed_by_its_callback() -> None:
    store, received = MemoryStore(), Received()

    def once(update: Update) -> None:
        received(update)
        watch.close()

    watch = store.watch(ROOT, store.read(ROOT).revision, once)
    put(store, A, "1")
    put(store, A, "2")

    assert len(received.updates) == 1
