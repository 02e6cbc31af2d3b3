"""rendezvous.engine where no real etcd is needed to say what is right: its history's bounds, its leases' time."""

from __future__ import annotations

from typing import Any

import pytest

from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.engine.leases import LeaseNotFound
from elaunch.rendezvous.engine.mvcc import UNBOUNDED, Compacted, Refused, WrittenRevision, prefix_end
from elaunch.rendezvous.engine.requests import DeleteRequest, PutRequest, RangeRequest, TxnRequest

ALL = RangeRequest(UNBOUNDED, UNBOUNDED)


def remembered(engine: Engine) -> list[int]:
    """The revisions that the history has, from the oldest."""
    first = 1
    while True:
        try:
            return [written.revision for written in engine.since(first, 10**9)]
        except Compacted as compacted:
            first = compacted.revision


def test_a_fresh_engine_has_revision_1_and_no_history() -> None:
    engine = Engine()

    assert engine.revision == 1
    assert engine.since(0, 10) == []


def test_the_history_keeps_the_last_revisions_and_now_and_then_forgets_the_rest() -> None:
    engine = Engine(history_revisions=100)
    lengths = []

    for _ in range(1000):
        engine.put(PutRequest(b"key"))
        lengths.append(len(remembered(engine)))

    assert remembered(engine)[-1] == engine.revision == 1001
    assert min(lengths[200:]) >= 100
    assert max(lengths) <= 111


def test_the_history_forgets_sooner_where_it_is_large() -> None:
    engine = Engine(history_bytes=10_000)

    for turn in range(1000):
        engine.put(PutRequest(b"key", b"%d" % turn * 200))

    assert len(remembered(engine)) < 30
    assert engine.range(ALL).kvs[0].value == b"999" * 200


def test_one_value_larger_than_the_history_may_be_is_kept() -> None:
    engine = Engine(history_bytes=10)

    for key in (b"a", b"b", b"a"):
        engine.put(PutRequest(key, b"x" * 100))

    assert [kv.key for kv in engine.range(ALL).kvs] == [b"a", b"b"]


def test_what_was_deleted_long_ago_takes_no_memory() -> None:
    engine = Engine(history_revisions=10)
    for turn in range(1000):
        engine.put(PutRequest(b"key %d" % turn))
        engine.delete(DeleteRequest(b"key %d" % turn))

    engine.compact(engine.revision)

    assert len(engine._keys._versions) == len(engine._keys._index) == 0


def test_what_the_revision_of_the_compaction_itself_wrote_is_still_told() -> None:
    """Its deletions too, which etcd 3.4.23 and 3.5.1 lose."""
    engine = Engine()
    engine.put(PutRequest(b"key"))
    engine.delete(DeleteRequest(b"key"))

    engine.compact(3)

    assert [event.version for written in engine.since(3, 10) for event in written.events] == [0]
    with pytest.raises(Compacted):
        engine.since(2, 10)


def test_each_revision_is_told_once_as_soon_as_it_is_written() -> None:
    engine, told = Engine(), list[WrittenRevision]()
    engine.listen(told.append)

    engine.txn(TxnRequest(success=(PutRequest(b"b"), PutRequest(b"a"), RangeRequest(b"a"))))
    engine.txn(TxnRequest(success=(RangeRequest(b"a"),)))
    engine.delete(DeleteRequest(b"nothing"))
    engine.delete(DeleteRequest(b"a", b"c"))

    assert [(written.revision, [kv.key for kv in written.events]) for written in told] == [
        (2, [b"b", b"a"]),
        (3, [b"a", b"b"]),
    ]


def test_a_refused_transaction_leaves_no_trace() -> None:
    engine, told = Engine(), list[WrittenRevision]()
    engine.listen(told.append)

    for bad in (PutRequest(b"b", lease=5), RangeRequest(b"b", revision=9)):
        with pytest.raises(Refused):
            engine.txn(TxnRequest(success=(PutRequest(b"a"), bad)))

    assert engine.range(ALL).total == 0
    assert told == []


def test_a_lease_ends_at_its_time_and_not_before() -> None:
    engine = Engine()
    engine.tell_time(100.0)
    engine.grant(7, 5)
    engine.put(PutRequest(b"key", lease=7))

    engine.tell_time(104.9)
    engine.end_leases()
    before = engine.range(ALL).total
    assert engine.idle_until_s == 105.0
    engine.tell_time(105.0)
    engine.end_leases()

    assert (before, engine.range(ALL).total) == (1, 0)
    assert engine.keep_alive(7) == 0
    assert engine.idle_until_s == float("inf")


def test_a_renewed_lease_has_its_whole_time_again() -> None:
    engine = Engine()
    engine.grant(7, 5)
    for now_s in (3.0, 6.0, 9.0):
        engine.tell_time(now_s)
        engine.end_leases()
        assert engine.keep_alive(7) == 5

    engine.tell_time(13.0)
    engine.end_leases()

    assert engine.time_to_live(7) == (1, 5, [])


def test_a_lease_that_was_renewed_meanwhile_does_not_keep_others_from_ending() -> None:
    engine = Engine()
    engine.grant(7, 5)
    engine.grant(8, 7)
    engine.tell_time(4.0)
    engine.keep_alive(7)

    for now_s in (5.0, 7.0):
        engine.tell_time(now_s)
        engine.end_leases()

    assert (engine.keep_alive(7), engine.keep_alive(8)) == (5, 0)


def test_a_lease_without_an_id_is_given_one_that_is_free() -> None:
    engine = Engine()
    engine.grant(2, 5)
    engine.grant(2**63 - 1, 5)

    chosen = [engine.grant(0, 5)[0] for _ in range(3)]

    assert len({*chosen, 2, 2**63 - 1}) == 5
    assert all(0 < lease < 2**63 for lease in chosen)


def test_a_revoked_lease_is_gone() -> None:
    engine = Engine()
    engine.grant(7, 5)
    engine.revoke(7)

    with pytest.raises(LeaseNotFound):
        engine.revoke(7)


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"a", b"b"), (b"a/", b"a0"), (b"a\xff", b"b"), (b"\xff\xff", UNBOUNDED), ("é".encode(), b"\xc3\xaa")],
)
def test_a_prefix_ends_before_the_next_key_without_it(prefix: bytes, end: Any) -> None:
    assert prefix_end(prefix) == end
