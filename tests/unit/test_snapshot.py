"""rendezvous.snapshot: a job's keys, and what they say."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.snapshot import Keys, Snapshot, read_snapshot
from elaunch.rendezvous.store import Absent, Txn, Unchanged
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    JobSpec,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    Program,
    ProgramKind,
    RankTable,
)

KEYS = Keys("job")
SPEC = JobSpec("job", Program(ProgramKind.SCRIPT, "train.py"))
NODE = Node("a", "host-a", "10.0.0.1", 8, 17)


def failure(node_id: str, message: str) -> Failure:
    return Failure(FailureKind.EXIT_CODE, 0, node_id, node_id, 0, 0, 1, 1, message)


def table(generation: int) -> RankTable:
    return RankTable(generation, (), "host-a", 1, f"table {generation}")


def read(store: MemoryStore) -> Snapshot:
    return read_snapshot(KEYS, store.read(KEYS.root))


def store_with(puts: dict[str, str]) -> MemoryStore:
    store = MemoryStore()
    store.commit(Txn((), puts))
    return store


def test_no_keys_say_nothing() -> None:
    assert read(MemoryStore()) == Snapshot(KEYS)


def test_every_key_of_the_protocol_is_read() -> None:
    ended = Outcome(OutcomeKind.SUCCEEDED, "done", 1, 0, 3)
    store = store_with(
        {
            KEYS.spec: encode(SPEC),
            KEYS.generation: encode(Generation(1, OpenKind.FAIL, "rank 0 failed")),
            KEYS.leader: "a",
            KEYS.ended: encode(ended),
            KEYS.member("a"): encode(NODE),
            KEYS.joined(1, "a"): encode(Joined("a", 29500)),
            KEYS.failure(0, "a"): encode(failure("a", "x")),
            KEYS.done(1, "a"): "",
            KEYS.table(1): encode(table(1)),
        }
    )

    snapshot = read(store)

    assert snapshot.spec == SPEC
    assert snapshot.generation == Generation(1, OpenKind.FAIL, "rank 0 failed")
    assert (snapshot.leader, snapshot.ended) == ("a", ended)
    assert snapshot.members == {"a": NODE}
    assert snapshot.joined == {1: (Joined("a", 29500),)}
    assert snapshot.failures == {0: (failure("a", "x"),)}
    assert snapshot.done == {1: frozenset({"a"})}
    assert snapshot.tables == {1: table(1)}


def test_failures_stand_in_the_order_in_which_they_were_first_recorded() -> None:
    store = MemoryStore()
    for node_id in ("z", "a", "m"):
        store.commit(Txn((), {KEYS.failure(0, node_id): encode(failure(node_id, "short"))}))
    store.commit(Txn((), {KEYS.failure(0, "z"): encode(failure("z", "with its output"))}))

    messages = [(f.node_id, f.message) for f in read(store).failures[0]]

    assert messages == [("z", "with its output"), ("a", "short"), ("m", "short")]


def test_the_newest_table_is_the_one_of_the_highest_generation() -> None:
    store = store_with({KEYS.table(g): encode(table(g)) for g in (9, 10, 2)})

    newest = read(store).table

    assert newest
    assert newest.generation == 10


def test_keys_of_higher_generations_sort_later() -> None:
    names = [KEYS.table(9), KEYS.table(10), KEYS.table(999), KEYS.table(1000)]

    assert names == sorted(names)


def test_the_generation_guard_fails_once_a_generation_was_opened() -> None:
    store = store_with({KEYS.generation: encode(Generation(0, OpenKind.START, ""))})
    snapshot = read(store)

    before = store.commit(Txn((snapshot.gen_guard,), {KEYS.leader: "a"}))
    store.commit(Txn((), {KEYS.generation: encode(Generation(1, OpenKind.FAIL, ""))}))
    after = store.commit(Txn((snapshot.gen_guard,), {KEYS.leader: "b"}))

    assert (before, after) == (True, False)
    assert isinstance(snapshot.gen_guard, Unchanged)


def test_the_live_guard_fails_once_the_job_has_ended() -> None:
    store = MemoryStore()
    guard = read(store).live_guard

    before = store.commit(Txn((guard,), {KEYS.ended: "x"}))
    after = store.commit(Txn((guard,), {KEYS.leader: "b"}))

    assert (before, after) == (True, False)
    assert guard == Absent(KEYS.ended)


def test_another_jobs_keys_are_not_read() -> None:
    store = store_with({Keys("job-2").leader: "b", Keys("jo").leader: "c", f"{KEYS.root}job/ctl/leader": "d"})

    assert read(store) == Snapshot(KEYS)


def test_a_record_that_is_none_is_refused() -> None:
    store = store_with({KEYS.member("a"): '{"node_id":"a"}'})

    with pytest.raises(ValueError, match="not a Node"):
        read(store)


def test_keys_of_a_later_version_are_passed_over() -> None:
    store = store_with({f"{KEYS.root}ctl/colour": "red", f"{KEYS.root}hints/a/b": "x"})

    assert read(store) == Snapshot(KEYS)
