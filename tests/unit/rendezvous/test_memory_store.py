"""rendezvous.engine keeps the store's contract, and what else an agent alone on its node relies on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.store import Absent, Put, Txn, Update
from tests.unit.rendezvous.store_contract import LONG_TTL_S, ROOT, StoreContract, Told, new_lease, put

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


def test_watches_are_told_before_the_call_that_writes_returns() -> None:
    store, told = MemoryStore(), Told()
    store.watch(ROOT, store.read(ROOT).revision, told)
    lease = new_lease(store)
    counts = []

    store.commit(Txn((), (Put(A, "1", lease),)))
    counts.append(len(told.updates))
    store.revoke(lease)
    counts.append(len(told.updates))
    store.commit(Txn((), (Put(A, "2", new_lease(store)),)))
    store.advance(LONG_TTL_S)
    counts.append(len(told.updates))

    assert counts == [1, 2, 4]


def test_what_is_told_may_write_and_every_watch_still_hears_each_revision_in_order() -> None:
    store, second = MemoryStore(), Told()
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


def test_a_watch_may_be_closed_by_what_it_tells() -> None:
    store, told = MemoryStore(), Told()

    def once(update: Update) -> None:
        told(update)
        watch.close()

    watch = store.watch(ROOT, store.read(ROOT).revision, once)
    put(store, A, "1")
    put(store, A, "2")

    assert len(told.updates) == 1
