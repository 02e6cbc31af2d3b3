"""What every store must do, whoever keeps the keys: `class TestX(StoreContract)` with a `store` fixture runs it all.

`store` is empty under ROOT and nobody else writes to it. A watch may tell late where the store is elsewhere: the
fixture `settle` waits until all that was committed has been told.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from elaunch.rendezvous.store import Absent, Entry, Store, Txn, Unchanged

ROOT = "/elaunch/contract/"
A, B, C = f"{ROOT}a", f"{ROOT}b", f"{ROOT}c"


def put(store: Store, key: str, value: str) -> Entry:
    assert store.commit(Txn((), {key: value}))
    return store.read(key).entries[key]


class StoreContract:
    """Facts about a `Store`."""

    @pytest.fixture
    def settle(self) -> Callable[[], None]:
        return lambda: None

    def test_an_empty_prefix_has_no_entries(self, store: Store) -> None:
        assert dict(store.read(ROOT).entries) == {}

    def test_what_was_put_is_read(self, store: Store) -> None:
        store.commit(Txn((), {A: "1", B: ""}))

        assert {key: entry.value for key, entry in store.read(ROOT).entries.items()} == {A: "1", B: ""}

    def test_text_comes_back_as_it_went_in(self, store: Store) -> None:
        text = 'é 🏖 "quoted" \n\t\0 \\ ' + "x" * 10_000

        assert put(store, A, text).value == text

    def test_a_read_holds_only_keys_with_its_prefix_in_order(self, store: Store) -> None:
        for key in (f"{ROOT}t/10", f"{ROOT}t/9", f"{ROOT}u", f"{ROOT}t", f"{ROOT}t/"):
            store.commit(Txn((), {key: "x"}))

        assert list(store.read(f"{ROOT}t/").entries) == [f"{ROOT}t/", f"{ROOT}t/10", f"{ROOT}t/9"]

    def test_a_view_does_not_change_with_the_store(self, store: Store) -> None:
        put(store, A, "1")

        view = store.read(ROOT)
        store.commit(Txn((), {A: "2", B: "3"}))

        assert {key: entry.value for key, entry in view.entries.items()} == {A: "1"}

    def test_a_repeated_put_keeps_the_create_revision(self, store: Store) -> None:
        first = put(store, A, "1")

        second = put(store, A, "1")

        assert first.create_revision == first.mod_revision
        assert second.create_revision == first.create_revision
        assert second.mod_revision > first.mod_revision

    def test_a_key_that_was_deleted_is_created_anew(self, store: Store) -> None:
        first = put(store, A, "1")
        store.commit(Txn((), deletes=(A,)))

        second = put(store, A, "2")

        assert second.create_revision == second.mod_revision > first.mod_revision

    def test_all_writes_of_a_transaction_have_one_revision_which_is_the_stores(self, store: Store) -> None:
        put(store, C, "old")
        before = store.read(ROOT).revision

        store.commit(Txn((), {A: "1", B: "2"}, (C,)))

        view = store.read(ROOT)
        assert {entry.mod_revision for entry in view.entries.values()} == {view.revision}
        assert list(view.entries) == [A, B]
        assert view.revision > before

    def test_the_order_of_creation_is_the_order_of_revisions(self, store: Store) -> None:
        revisions = [put(store, key, "x").create_revision for key in (C, A, B)]

        assert revisions == sorted(set(revisions))

    def test_a_create_if_absent_has_one_winner(self, store: Store) -> None:
        won = [store.commit(Txn((Absent(A),), {A: name})) for name in ("first", "second")]

        assert won == [True, False]
        assert store.read(A).entries[A].value == "first"

    def test_a_key_that_was_deleted_is_absent_again(self, store: Store) -> None:
        put(store, A, "1")
        store.commit(Txn((), deletes=(A,)))

        assert store.commit(Txn((Absent(A),), {A: "2"}))

    def test_an_unchanged_guard_holds_until_the_next_write_even_of_the_same_value(self, store: Store) -> None:
        first = put(store, A, "1")

        held = store.commit(Txn((Unchanged(A, first.mod_revision),), {B: "x"}))
        put(store, A, "1")
        held_later = store.commit(Txn((Unchanged(A, first.mod_revision),), {C: "x"}))

        assert (held, held_later) == (True, False)
        assert list(store.read(ROOT).entries) == [A, B]

    def test_an_unchanged_guard_does_not_hold_for_a_key_that_is_gone_or_was_made_again(self, store: Store) -> None:
        first = put(store, A, "1")
        guard = Unchanged(A, first.mod_revision)

        store.commit(Txn((), deletes=(A,)))
        gone = store.commit(Txn((guard,), {B: "x"}))
        put(store, A, "1")
        again = store.commit(Txn((guard,), {B: "x"}))

        assert (gone, again) == (False, False)

    def test_a_refused_transaction_writes_nothing_at_all(self, store: Store) -> None:
        put(store, A, "1")
        before = store.read(ROOT)

        happened = store.commit(Txn((Absent(B), Absent(A)), {B: "x", C: "y"}, (A,)))

        assert not happened
        assert store.read(ROOT) == before

    def test_a_guard_looks_at_the_store_before_the_transactions_own_writes(self, store: Store) -> None:
        assert store.commit(Txn((Absent(A),), {A: "1"}))

    def test_a_transaction_that_writes_nothing_moves_no_revision(self, store: Store) -> None:
        put(store, A, "1")
        before = store.read(ROOT)

        happened = [store.commit(Txn(())), store.commit(Txn((), deletes=(B,))), store.commit(Txn((Absent(B),)))]

        assert happened == [True, True, True]
        assert store.read(ROOT) == before

    def test_a_watch_is_told_of_puts_repeated_puts_and_deletes(self, store: Store, settle: Callable[[], None]) -> None:
        told: list[int] = []
        store.watch(ROOT, lambda: told.append(len(store.read(ROOT).entries)))
        counts = []

        for txn in (Txn((), {A: "1"}), Txn((), {A: "1"}), Txn((), deletes=(A,))):
            store.commit(txn)
            settle()
            counts.append(len(told))

        assert counts == [1, 2, 3]
        assert told == [1, 1, 0], "what was committed must be readable when the watch tells of it"

    def test_a_watch_is_not_told_of_other_keys_refusals_or_nothing(
        self, store: Store, settle: Callable[[], None]
    ) -> None:
        put(store, A, "1")
        told: list[str] = []
        store.watch(f"{ROOT}ctl/", lambda: told.append("ctl"))

        store.commit(Txn((), {B: "1"}))
        store.commit(Txn((Absent(A),), {f"{ROOT}ctl/x": "1"}))
        store.commit(Txn((), deletes=(f"{ROOT}ctl/x",)))
        settle()

        assert told == []

    def test_every_watch_is_told_once_of_one_transaction(self, store: Store, settle: Callable[[], None]) -> None:
        told: list[str] = []
        store.watch(ROOT, lambda: told.append("all"))
        store.watch(A, lambda: told.append("a"))

        store.commit(Txn((), {A: "1", B: "2"}))
        settle()

        assert sorted(told) == ["a", "all"]

    @pytest.mark.parametrize("seed", range(20))
    def test_random_transactions_do_what_a_plain_model_does(self, store: Store, seed: int) -> None:
        rng = random.Random(seed)
        keys = [f"{ROOT}{name}" for name in "abcd"]
        model: dict[str, str] = {}
        read = store.read(ROOT)

        for turn in range(60):
            if rng.random() < 0.5:
                read = store.read(ROOT)
            guard_key, put_key, delete_key = rng.choice(keys), *rng.sample(keys, 2)
            entry = read.entries.get(guard_key)
            guard = Unchanged(guard_key, entry.mod_revision) if entry else Absent(guard_key)
            now = store.read(ROOT).entries
            holds = now.get(guard_key) == entry

            happened = store.commit(Txn((guard,), {put_key: str(turn)}, (delete_key,)))

            assert happened == holds, f"seed {seed}, turn {turn}"
            if holds:
                model[put_key] = str(turn)
                model.pop(delete_key, None)
            found = {key: entry.value for key, entry in store.read(ROOT).entries.items()}
            assert found == model, f"seed {seed}, turn {turn}"
