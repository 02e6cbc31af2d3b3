"""The tests that every store must pass. `class TestX(StoreContract)` with a few fixtures runs them all.

`store` is empty under ROOT, and no other client writes to it. `compact` forgets the store's history before a revision.
`elapse` makes time pass for leases. A store in another process may report changes and end leases late.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from elaunch.rendezvous.store import (
    Absent,
    Changes,
    Delete,
    Denied,
    KeyEntry,
    LeaseGone,
    Put,
    Store,
    Txn,
    Update,
    View,
)
from tests.harness import slow, wait_for
from tests.unit.rendezvous.store_model import Model, random_txn

ROOT = "/elaunch/contract/"
A, B, C, D = (f"{ROOT}{name}" for name in "abcd")
# The shortest that every store gives.
TTL_S = 2.0
LONG_TTL_S = 60.0


def put(store: Store, key: str, value: str = "x", lease: int = 0) -> KeyEntry:
    assert store.commit(Txn((), (Put(key, value, lease),))).held
    return store.read(key).entries[key]


def new_lease(store: Store, ttl_s: float = LONG_TTL_S) -> int:
    """A lease under an id that no other test has drawn."""
    lease = random.SystemRandom().randrange(1, 2**63)
    store.grant(lease, ttl_s)
    return lease


def values(store: Store, prefix: str = ROOT) -> dict[str, str]:
    return {key: entry.value for key, entry in store.read(prefix).entries.items()}


class Received:
    """The updates of a watch, in the order in which they came."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def __call__(self, update: Update) -> None:
        self.updates.append(update)

    def all_until(self, revision: int) -> list[Changes | View]:
        """All updates, once `revision` was reported. Waits for it."""

        def found() -> bool:
            return any(isinstance(update, (Changes, View)) and update.revision >= revision for update in self.updates)

        wait_for(found, f"revision {revision}; received so far: {self.updates}")
        assert all(isinstance(update, (Changes, View)) for update in self.updates), self.updates
        return [update for update in self.updates if isinstance(update, (Changes, View))]

    def values_until(self, revision: int) -> list[tuple[int, dict[str, str | None]]]:
        """The same, without the revisions of each entry."""
        return [
            (update.revision, {key: entry.value if entry else None for key, entry in update.entries.items()})
            for update in self.all_until(revision)
        ]


def replayed(view: View, updates: list[Changes | View]) -> dict[str, KeyEntry]:
    """The view after all later updates, which must be in order."""
    entries = dict(view.entries)
    revision = view.revision
    for update in updates:
        assert update.revision > revision
        revision = update.revision
        if isinstance(update, View):
            entries.clear()
        for key, entry in update.entries.items():
            entries.pop(key, None)
            if entry:
                entries[key] = entry
    return entries


class StoreContract:
    """Facts about a `Store`."""

    @pytest.fixture
    def compact(self) -> Callable[[int], None]:
        raise NotImplementedError

    @pytest.fixture
    def elapse(self) -> Callable[[float], None]:
        def passed(seconds: float) -> None:
            end_s = time.monotonic() + seconds
            wait_for(lambda: time.monotonic() >= end_s, f"{seconds} s to pass", every_s=0.01)

        return passed

    # Reading.

    def test_text_comes_back_as_it_went_in(self, store: Store) -> None:
        text = 'é 🏖 "quoted" \n\t\0 \\ ' + "x" * 10_000

        assert put(store, f"{ROOT}{text[:20]}", text).value == text

    # Leases.

    def test_granting_a_lease_again_changes_nothing(self, store: Store) -> None:
        lease = new_lease(store, LONG_TTL_S)
        put(store, A, "1", lease)
        before = store.read(ROOT)

        store.grant(lease, 10 * LONG_TTL_S)

        assert store.read(ROOT) == before
        assert LONG_TTL_S - 1 <= store.keep_alive(lease) <= LONG_TTL_S

    def test_a_lease_that_never_was_or_was_revoked_has_no_time(self, store: Store) -> None:
        lease = new_lease(store)
        store.revoke(lease)

        assert store.keep_alive(lease) == 0.0
        assert store.keep_alive(random.SystemRandom().randrange(1, 2**63)) == 0.0

    def test_revoking_a_lease_deletes_its_keys_at_one_revision(self, store: Store) -> None:
        lease, other = new_lease(store), new_lease(store)
        store.commit(Txn((), (Put(A, "1", lease), Put(B, "1", lease), Put(C, "1", other), Put(D, "1"))))
        before = store.read(ROOT).revision
        received = Received()
        watch = store.watch(ROOT, before, received)

        store.revoke(lease)

        assert list(store.read(ROOT).entries) == [C, D]
        assert received.values_until(before + 1) == [(before + 1, {A: None, B: None})]
        watch.close()

    def test_a_key_put_again_leaves_its_old_lease(self, store: Store) -> None:
        lease, other = new_lease(store), new_lease(store)
        store.commit(Txn((), (Put(A, "1", lease), Put(B, "1", lease), Put(C, "1", lease))))

        store.commit(Txn((), (Put(A, "2"), Put(B, "2", other), Delete(C))))
        put(store, C, "2")
        store.revoke(lease)

        assert values(store) == {A: "2", B: "2", C: "2"}
        store.revoke(other)
        assert values(store) == {A: "2", C: "2"}

    def test_a_put_with_an_ended_lease_fails_the_whole_transaction(self, store: Store) -> None:
        lease = new_lease(store)
        store.revoke(lease)
        put(store, A, "1")
        before = store.read(ROOT)

        with pytest.raises(LeaseGone):
            store.commit(Txn((), (Delete(A), Put(B, "1"), Put(C, "1", lease))))

        assert store.read(ROOT) == before

    def test_an_ended_lease_in_the_other_branch_does_not_matter(self, store: Store) -> None:
        lease = new_lease(store)
        store.revoke(lease)

        assert store.commit(Txn((), (Put(A, "1"),), (Put(B, "1", lease),))).held
        assert values(store) == {A: "1"}

    def test_a_lease_that_ends_takes_its_keys_at_one_revision_and_watches_are_notified(
        self, store: Store, elapse: Callable[[float], None]
    ) -> None:
        lease = new_lease(store, TTL_S)
        store.commit(Txn((), (Put(A, "1", lease), Put(B, "1", lease), Put(C, "1"))))
        before = store.read(ROOT).revision
        received = Received()
        watch = store.watch(ROOT, before, received)

        elapse(TTL_S)

        assert received.values_until(before + 1) == [(before + 1, {A: None, B: None})]
        assert list(store.read(ROOT).entries) == [C]
        assert store.keep_alive(lease) == 0.0
        with pytest.raises(LeaseGone):
            put(store, A, "2", lease)
        watch.close()

    def test_a_lease_that_is_kept_alive_outlives_its_time(self, store: Store, elapse: Callable[[float], None]) -> None:
        # Long beside the pauses between its renewals, which a busy machine may stretch.
        kept_ttl_s = 2 * TTL_S
        kept, left = new_lease(store, kept_ttl_s), new_lease(store, TTL_S)
        store.commit(Txn((), (Put(A, "1", kept), Put(B, "1", left))))

        for _ in range(6):
            elapse(kept_ttl_s / 5)
            assert kept_ttl_s / 2 <= store.keep_alive(kept) <= kept_ttl_s
        wait_for(lambda: store.keep_alive(kept) and B not in values(store), "the end of the other lease")

        assert values(store) == {A: "1"}

    # Watches.

    def test_a_closed_watch_delivers_nothing_more(self, store: Store) -> None:
        before = store.read(ROOT).revision
        closed, other = Received(), Received()
        watch = store.watch(ROOT, before, closed)
        put(store, A, "1")
        received_before = closed.values_until(before + 1)

        watch.close()
        watch.close()
        still = store.watch(ROOT, before, other)
        put(store, A, "2")

        assert len(other.values_until(before + 2)) == 2
        assert closed.values_until(before + 1) == received_before
        still.close()

    def test_a_watch_from_before_the_compaction_delivers_a_view_and_then_changes(
        self, store: Store, compact: Callable[[int], None]
    ) -> None:
        long_ago = put(store, A, "1").mod_revision
        put(store, B, "gone")
        store.commit(Txn((), (Delete(B), Put(f"{ROOT}c/1", "c"))))
        now = put(store, A, "2").mod_revision
        compact(now)
        received = Received()

        watch = store.watch(ROOT, long_ago, received)
        first = received.all_until(now)
        put(store, B, "new")

        assert isinstance(first[0], View)
        assert received.values_until(now + 1) == [(now, {A: "2", f"{ROOT}c/1": "c"}), (now + 1, {B: "new"})]
        watch.close()

    def test_a_watch_from_now_delivers_what_is_there_and_has_begun_then(self, store: Store) -> None:
        put(store, A, "before")
        received = Received()

        watch = store.watch(ROOT, None, received)
        watch.begun()
        assert received.updates == [store.read(ROOT)]
        put(store, D, "1")
        now = put(store, A, "after")

        first, *changes = received.all_until(now.mod_revision)
        assert isinstance(first, View)
        assert replayed(first, changes) == store.read(ROOT).entries
        watch.close()

    def test_a_compaction_does_not_disturb_a_watch_that_is_up_to_date(
        self, store: Store, compact: Callable[[int], None]
    ) -> None:
        before = store.read(ROOT).revision
        received = Received()
        watch = store.watch(ROOT, before, received)
        for turn in range(3):
            put(store, A, str(turn))
        received.all_until(before + 3)

        compact(before + 3)
        put(store, A, "after")

        assert [update.revision for update in received.all_until(before + 4)] == [before + n for n in (1, 2, 3, 4)]
        watch.close()

    # Limits.

    @pytest.mark.parametrize(
        "txn",
        [
            Txn((), (Put(A, "x" * 800_000), Put(B, "x" * 800_000))),
            Txn((), (), (Put(A, "x" * 1_600_000),)),
            Txn((), tuple(Delete(f"{ROOT}{number}") for number in range(129))),
            Txn((Absent(A),) * 129),
            Txn((), (Put(A, "1"), Put(A, "2"))),
            Txn((), (Put(B, "1"), Delete(A, C))),
        ],
    )
    def test_what_is_too_large_is_refused_as_by_a_real_etcd(self, store: Store, txn: Txn) -> None:
        with pytest.raises(Denied):
            store.commit(txn)

        assert not store.read(ROOT).entries

    def test_a_transaction_of_128_operations_and_of_1_mib_is_taken(self, store: Store) -> None:
        guards = tuple(Absent(f"{ROOT}{number}") for number in range(128))

        assert store.commit(Txn(guards, tuple(Put(f"{ROOT}{number}", "x" * 8192) for number in range(128)))).held

    # All of it at random.

    @pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 10))])
    def test_random_transactions_and_watches_do_what_a_plain_model_does(self, store: Store, seed: int) -> None:
        rng = random.Random(seed)
        model = Model(store.read(ROOT).revision)
        keys = [f"{ROOT}{name}" for name in ("a", "a/1", "a/2", "b", "b/1", "c")]
        prefixes = [ROOT, f"{ROOT}a", f"{ROOT}a/", f"{ROOT}b"]
        open_watches = []

        for turn in range(60):
            if turn % 10 == 0:
                prefix, after, seen = rng.choice(prefixes), rng.randint(model.first, model.revision), Received()
                open_watches.append((prefix, after, seen, store.watch(prefix, after, seen)))
            txn = random_txn(rng, model, keys, prefixes, str(turn))

            response = store.commit(txn)

            assert response == model.commit(txn), f"seed {seed}, turn {turn}, {txn}"
            assert store.read(ROOT) == model.read(ROOT), f"seed {seed}, turn {turn}, {txn}"
        last = Txn((), tuple(Put(f"{prefix}end", "") for prefix in prefixes if prefix != f"{ROOT}a"))
        store.commit(last)
        model.commit(last)

        for prefix, after, seen, watch in open_watches:
            assert seen.all_until(model.revision) == model.changes(prefix, after), f"seed {seed}, {prefix} from {after}"
            watch.close()
