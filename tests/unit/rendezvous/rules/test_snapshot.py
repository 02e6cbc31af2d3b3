"""rendezvous.rules.snapshot: a job's keys and their records, and a rank table as compact text."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot, SnapshotReader, decode_table, encode_table, seats_of
from elaunch.rendezvous.rules.transactions import become_leader
from elaunch.rendezvous.store import Delete, Op, Put, Txn
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    Terms,
)

KEYS = Keys("job")
TERMS = Terms(2, 4, command="train.py", digest="0123")
NODE = Node("a", "host-a", "10.0.0.1", 8)


def failure(node_id: str, message: str) -> Failure:
    return Failure(FailureKind.EXIT_CODE, 0, node_id, node_id, 0, 0, 1, 1, message)


def table(generation: int) -> RankTable:
    return RankTable(generation, (), "host-a", 1, f"table {generation}")


def read(store: MemoryStore) -> Snapshot:
    return SnapshotReader(KEYS).read(store.read(KEYS.root), whole=True)


def write(store: MemoryStore, *ops: Op) -> None:
    store.commit(Txn((), ops))


def store_with(puts: dict[str, str]) -> MemoryStore:
    store = MemoryStore()
    store.grant(9, 3600.0)
    write(store, *(Put(key, value, 9 if key.endswith("ctl/leader") else 0) for key, value in puts.items()))
    return store


def test_every_key_of_the_protocol_is_read() -> None:
    ended = Outcome(OutcomeKind.SUCCEEDED, "done", 1, 0, 3)
    store = store_with(
        {
            KEYS.spec: encode(TERMS),
            KEYS.generation: encode(Generation(1, OpenKind.FAIL, "rank 0 failed")),
            KEYS.leader: "a",
            KEYS.ended: encode(ended),
            KEYS.member("a"): encode(NODE),
            KEYS.joined(1, "a"): encode(Joined("a", 29500)),
            KEYS.failure(0, "a"): encode(failure("a", "x")),
            KEYS.done(1, "a"): "",
            KEYS.table(1): encode_table(table(1)),
        }
    )

    snapshot = read(store)

    assert snapshot.terms == TERMS
    assert snapshot.generation == Generation(1, OpenKind.FAIL, "rank 0 failed")
    assert (snapshot.leader, snapshot.ended) == ("a", ended)
    assert snapshot.members == {"a": NODE}
    assert snapshot.joined == {1: {"a": Joined("a", 29500)}}
    assert snapshot.failures == {0: (failure("a", "x"),)}
    assert snapshot.done == {1: frozenset({"a"})}
    assert snapshot.tables == {1: table(1)}
    assert (snapshot.revision, snapshot.whole) == (store.read(KEYS.root).revision, True)
    assert snapshot.generation_revision == snapshot.leader_revision == snapshot.revision


def test_failures_stand_in_the_order_in_which_they_were_first_recorded() -> None:
    store = MemoryStore()
    for node_id in ("z", "a", "m"):
        write(store, Put(KEYS.failure(0, node_id), encode(failure(node_id, "short"))))
    write(store, Put(KEYS.failure(0, "z"), encode(failure("z", "with its output"))))

    messages = [(f.node_id, f.message) for f in read(store).failures[0]]

    assert messages == [("z", "with its output"), ("a", "short"), ("m", "short")]


def test_the_current_table_is_the_newest_generations_or_none_while_that_forms() -> None:
    store = store_with({KEYS.table(3): encode_table(table(3))})

    tables = []
    for number in (3, 4):
        write(store, Put(KEYS.generation, encode(Generation(number, OpenKind.FAIL, ""))))
        tables.append((read(store).current_table, read(store).table))

    assert tables == [(table(3), table(3)), (None, table(3))]


RUNS = encode(Generation(3, OpenKind.FAIL, "rank 0 failed"))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        (KEYS.table(3), "{}", "not a rank table"),
        (KEYS.spec, "null", "not a Terms"),
        (KEYS.spec, encode(Terms(4, 2)), "not a Terms"),
        (KEYS.generation, "7", "not a Generation"),
        (KEYS.ended, "yes", "not a Outcome"),
    ],
)
def test_a_record_of_the_job_that_is_none_is_refused_with_its_key_and_its_value(
    key: str, value: str, what: str
) -> None:
    store = store_with({KEYS.leader: "a", KEYS.generation: RUNS, key: value})

    with pytest.raises(ValueError, match=what) as caught:
        read(store)

    assert str(caught.value).startswith(f"{key} in the store is {what}")
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        (KEYS.member("a"), '{"node_id":"a"}', "not a Node"),
        (KEYS.member("a"), encode(replace(NODE, host="a b")), "not a Node"),
        (KEYS.joined(3, "a"), "{}", "not a Joined"),
        (KEYS.failure(3, "a"), "[]", "not a Failure"),
        (KEYS.still(3, "a"), "{}", "not a IdleNode"),
        (KEYS.table(2), "{}", "not a rank table"),
        (KEYS.table(4), "x" * 1_000_000, "not a rank table"),
        (f"{KEYS.root}joined/x/a", "", "not a generation's"),
        (f"{KEYS.root}done/-/a", "", "not a generation's"),
        (f"{KEYS.control}table/new", "", "not a generation's"),
    ],
)
def test_any_other_record_that_is_none_costs_a_sentence_and_the_leader_deletes_it(
    key: str, value: str, what: str
) -> None:
    job = {KEYS.leader: "b", KEYS.generation: RUNS, KEYS.table(3): encode_table(table(3))}
    store = store_with(job | {key: value})
    reader = SnapshotReader(KEYS)

    first, second = (reader.read(store.read(KEYS.root), whole=True) for _ in range(2))

    assert [sentence.startswith(f"{key} in the store is {what}") for sentence in first.unreadable] == [True]
    assert len(first.unreadable[0]) < 1000
    assert second.unreadable == ()
    assert (first.members, first.joined, first.failures, first.still, first.done) == ({}, {}, {}, {}, {})
    assert [*first.tables] == [3]
    assert [op for _, op in second.repairs] == [Delete(key)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"port":1', '"port":70000'),
        ('"port":1', '"port":"1"'),
        ('"port":1', '"port":'),
        ('5ec12e7"}', "5ec12e7"),
        ('"progressed":false', '"progressed":0'),
    ],
)
def test_no_sentence_about_a_broken_record_shows_its_secret(old: str, new: str) -> None:
    joined = encode(Joined("a", 1, secret="5ec12e7"))
    sealed = encode_table(replace(table(2), secret="5ec12e7")).replace('"master_port":1', '"port":1')
    assert "5ec12e7" in joined
    assert "5ec12e7" in sealed[:200]
    broken = joined.replace(old, new)
    list_of_one, text = f"[{joined}]", json.dumps(joined)
    over_terms, reader = MemoryStore(), SnapshotReader(KEYS)
    over_terms.grant(7, 60.0)

    for key in (KEYS.joined(3, "a"), KEYS.member("a"), KEYS.table(2), KEYS.hang):
        for value in (broken, sealed.replace(old, new), list_of_one, text):
            sentences = read(store_with({key: value})).unreadable
            assert len(sentences) == 1
            assert "5ec12e7" not in sentences[0]
    for put in (Put(KEYS.spec, encode(Terms()), 7), Put(KEYS.spec, joined)):
        write(over_terms, put)
        sentences = reader.read(over_terms.read(KEYS.root), whole=True).unreadable
    assert len(sentences) == 1
    assert "5ec12e7" not in sentences[0]


def test_whatever_is_written_again_and_again_gets_one_sentence_and_thousands_get_a_few() -> None:
    store, reader = store_with({KEYS.member("a"): encode(NODE)}), SnapshotReader(KEYS)
    reader.read(store.read(KEYS.root), whole=True)
    counts = []
    for text in ("one", "two"):
        write(store, Put(KEYS.member("a"), text))
        counts.append(len(reader.read(store.read(KEYS.root), whole=True).unreadable))

    write(store, *(Put(KEYS.joined(3, f"x-{n}"), "x") for n in range(100)))

    assert counts == [1, 0]
    assert len(reader.read(store.read(KEYS.root), whole=True).unreadable) < 10


def test_over_a_leader_that_is_no_node_or_stands_on_no_lease_any_member_may_lead() -> None:
    store, reader = store_with({KEYS.generation: RUNS}), SnapshotReader(KEYS)
    store.grant(7, 60.0)
    write(store, Put(KEYS.leader, "a", 7), Put(KEYS.member("a"), encode(NODE), 7))
    for scribble, lease in (("b", 0), ("a\x1b[2J", 0), ("", 0), ("a b", 7)):
        reader.read(store.read(KEYS.root), whole=True)
        write(store, Put(KEYS.leader, scribble, lease))

        snapshot = reader.read(store.read(KEYS.root), whole=True)

        assert snapshot.leader == ""
        assert store.commit(become_leader(snapshot, NODE, 7)).held
        assert reader.read(store.read(KEYS.root), whole=True).leader == "a"


def test_a_generation_does_not_go_back() -> None:
    store, reader = store_with({KEYS.generation: RUNS}), SnapshotReader(KEYS)
    before = reader.read(store.read(KEYS.root), whole=True)
    write(store, Put(KEYS.generation, encode(Generation(2, OpenKind.START, ""))))

    after = reader.read(store.read(KEYS.root), whole=True)

    assert after.generation == before.generation
    assert [op for _, op in after.repairs] == [Put(KEYS.generation, RUNS)]


def test_the_runs_lease_is_not_forgotten_when_the_terms_are_overwritten() -> None:
    store, reader = MemoryStore(), SnapshotReader(KEYS)
    store.grant(7, 60.0)
    write(store, Put(KEYS.spec, encode(Terms()), 7))
    reader.read(store.read(KEYS.root), whole=True)
    write(store, Put(KEYS.spec, "scribbled"))

    snapshot = reader.read(store.read(KEYS.root), whole=True)

    assert (snapshot.lease, snapshot.terms) == (7, Terms())
    assert [op for _, op in snapshot.repairs] == [Put(KEYS.spec, encode(Terms()), 7)]


@pytest.mark.parametrize(
    ("key", "good"),
    [
        (KEYS.generation, encode(Generation(3, OpenKind.FAIL, "rank 0 failed"))),
        (KEYS.table(3), encode_table(table(3))),
        (KEYS.member("a"), encode(NODE)),
        (KEYS.failure(3, "a"), encode(failure("a", "x"))),
    ],
)
def test_of_an_overwritten_record_the_last_good_one_stands_with_one_sentence(key: str, good: str) -> None:
    store, reader = store_with({key: good}), SnapshotReader(KEYS)
    before = reader.read(store.read(KEYS.root), whole=True)
    write(store, Put(key, "scribbled"))

    first, second = (reader.read(store.read(KEYS.root), whole=True) for _ in range(2))

    for field in ("generation", "tables", "members", "failures"):
        assert getattr(first, field) == getattr(second, field) == getattr(before, field)
    assert len(first.unreadable) == 1
    assert first.unreadable[0].startswith(f"{key} in the store is not a ")
    assert "scribbled" in first.unreadable[0]
    assert second.unreadable == ()


def test_keys_of_a_later_version_are_passed_over() -> None:
    store = store_with({f"{KEYS.root}ctl/colour": "red", f"{KEYS.root}hints/a/b": "x"})

    snapshot = read(store)

    assert snapshot == Snapshot(KEYS, revision=snapshot.revision, whole=True)


def test_a_record_that_has_not_changed_is_decoded_once() -> None:
    store = store_with({KEYS.member("a"): encode(NODE), KEYS.member("b"): encode(replace(NODE, node_id="b"))})
    reader = SnapshotReader(KEYS)
    first = reader.read(store.read(KEYS.root), whole=True)
    write(store, Put(KEYS.member("b"), encode(replace(NODE, node_id="b"))))

    second = reader.read(store.read(KEYS.root), whole=True)

    assert second.members["a"] is first.members["a"]
    assert second.members["b"] is not first.members["b"]
    assert second.members == first.members


def test_a_reader_forgets_what_is_gone() -> None:
    store = store_with({KEYS.member("a"): encode(NODE)})
    reader = SnapshotReader(KEYS)
    view = store.read(KEYS.root)
    whole = reader.read(view, whole=True)

    empty = reader.read(MemoryStore().read(KEYS.root), whole=True)

    assert (len(whole.members), empty.members) == (1, {})
    assert reader.read(view, whole=True).members["a"] is not whole.members["a"]


def test_no_jobs_keys_lie_among_those_of_another() -> None:
    assert not Keys("a/b").root.startswith(Keys("a").root)


TABLE = RankTable(
    generation=12,
    seats=seats_of(
        [
            ("node-a-0000000a", 8, "trainer"),
            ("node-b-0000000b", 8, "trainer"),
            ("node-c-0000000c", 4, "trainer"),
            ("node-d-0000000d", 4, "reader"),
        ]
    ),
    master_addr="fd00::1",
    master_port=29500,
    reason="restart 2 of 3: é \ud800",
    restarts=2,
    restart_ages_s=(30.5, 0.0),
    barren=1,
    progressed=True,
)


def of_nodes(count: int) -> RankTable:
    nodes = [(f"gpu-{n:04}-{random.Random(n).getrandbits(32):08x}", 8, "default") for n in range(count)]
    return RankTable(7, seats_of(nodes), "10.0.0.1", 29500, "restart 1 of 3", restarts=1)


def test_a_table_of_a_thousand_nodes_is_below_12_kb_and_that_of_a_hundred_can_be_read_by_people() -> None:
    large = encode_table(of_nodes(1024))

    assert len(large.encode()) < 12_000
    assert decode_table(large) == of_nodes(1024)
    assert decode_table(large).world_size == 8192
    assert json.loads(encode_table(of_nodes(100)))["nodes"][0].startswith("gpu-0000-")


@pytest.mark.parametrize("text", ["", "{", "null", "3", "[]", '"text"', "{}"])
def test_what_is_no_table_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match="not a rank table: ") as caught:
        decode_table(text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 3),
        ("nodes", "node-a-0000000a"),
        ("nodes", ["a-0000000a"] * 4),
        ("slots", ["8", 8, 4, 4]),
        ("slots", [8, 8, 4, 0]),
        ("slots", [8]),
        ("slots", None),
        ("roles", ["default", "default", "default", 5]),
        ("generation", None),
        ("restarts", "many"),
        ("restart_ages_s", 3),
    ],
)
def test_a_table_with_a_field_that_does_not_fit_is_refused(field: str, value: object) -> None:
    record = {**json.loads(encode_table(TABLE)), field: value}

    with pytest.raises(ValueError, match="not a rank table: "):
        decode_table(json.dumps(record))
