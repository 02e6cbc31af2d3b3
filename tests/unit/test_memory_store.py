"""rendezvous.memory keeps the store's contract."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.store import Store, Txn
from tests.unit.store_contract import ROOT, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


def test_two_memory_stores_share_nothing() -> None:
    one, other = MemoryStore(), MemoryStore()

    one.commit(Txn((), {f"{ROOT}a": "1"}))

    assert not other.read(ROOT).entries
