"""rendezvous.rules.queries: questions over the store change nothing of the job, whoever writes them."""

from __future__ import annotations

import json

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.rules.queries import QUERY_BYTES_MAX, Query, Topic, post_query, post_response, read_query
from elaunch.rendezvous.rules.snapshot import Keys, SnapshotReader
from elaunch.rendezvous.store import Delete, KeyEntry, LeaseGone, Put, Txn, View
from elaunch.rendezvous.types import Generation, OpenKind

KEYS = Keys("night/1")
QUERY = Query("0123456789abcdef", Topic.STATUS, 7)
RUNNING = encode(Generation(0, OpenKind.START, "the job starts"))


def store() -> MemoryStore:
    """A store in which the job runs, and which has the client's lease."""
    made = MemoryStore()
    made.commit(Txn((), (Put(KEYS.generation, RUNNING),)))
    made.grant(7, 10)
    return made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 400,
        "x" * (QUERY_BYTES_MAX + 1),
        json.dumps({"identity": "0123456789abcdef", "topic": "status"}),
        json.dumps({"identity": "0123456789abcdef", "topic": "shutdown", "lease": 7}),
        json.dumps({"identity": "0123456789abcdef", "topic": "status", "lease": 0}),
        json.dumps({"identity": "0123456789abcdef", "topic": "status", "lease": 1 << 63}),
        json.dumps({"identity": "../../ctl/ended", "topic": "status", "lease": 7}),
    ],
)
def test_what_is_no_query_is_none_and_the_job_is_read_all_the_same(text: str) -> None:
    entries = {KEYS.query: KeyEntry(text, 2, 2), KEYS.generation: KeyEntry(RUNNING, 1, 1)}

    snapshot = SnapshotReader(KEYS).read(View(2, entries), whole=False)

    assert read_query(text) is None
    assert snapshot.query is None
    assert [op for _, op in snapshot.repairs] == [Delete(KEYS.query)], "on no lease it would block all queries"
    assert snapshot.unreadable == ()
    assert snapshot.generation == Generation(0, OpenKind.START, "the job starts")


def test_a_query_is_read_as_it_was_posted_and_there_is_one_at_a_time() -> None:
    with_job = store()

    first = with_job.commit(post_query(KEYS, QUERY))
    second = with_job.commit(post_query(KEYS, Query("f" * 16, Topic.STACKS, 7)))

    snapshot = SnapshotReader(KEYS).read(with_job.read(KEYS.control), whole=False)
    assert (first.held, second.held) == (True, False)
    assert snapshot.query == QUERY


def test_query_and_responses_go_with_the_clients_lease_and_a_late_response_is_not_written() -> None:
    with_job = store()
    with_job.commit(post_query(KEYS, QUERY))

    with_job.commit(post_response(KEYS, QUERY, "node-a-00000001", "{}"))
    responses = with_job.read(KEYS.responses(QUERY.identity)).entries
    with_job.revoke(7)

    assert list(responses) == [KEYS.responses(QUERY.identity, "node-a-00000001")]
    assert list(with_job.read("/").entries) == [KEYS.generation]
    with_job.commit(Txn((), (Put(KEYS.query, "another's"),)))
    with pytest.raises(LeaseGone):
        with_job.commit(post_response(KEYS, QUERY, "node-a-00000001", "{}"))


def test_no_agent_watches_the_responses_not_even_the_one_that_leads() -> None:
    key = KEYS.responses(QUERY.identity, "node-a-00000001")

    assert not key.startswith(KEYS.root)
    # Whatever a job is called, its keys are none of these.
    for run_id in ("?answers", "night/1", "%3Fanswers", "answers"):
        assert not key.startswith(Keys(run_id).root)


@pytest.mark.parametrize("lease", [0, 8])
@pytest.mark.parametrize("topic", [Topic.STATUS, Topic.STOP])
@pytest.mark.parametrize("is_over", [False, True])
def test_a_query_that_is_not_on_its_clients_lease_is_none_and_the_leader_deletes_it(
    lease: int, topic: Topic, is_over: bool
) -> None:
    with_job, reader = store(), SnapshotReader(KEYS)
    with_job.grant(8, 10)
    if is_over:
        with_job.commit(post_query(KEYS, QUERY))
        reader.read(with_job.read(KEYS.root), whole=True)
    with_job.commit(Txn((), (Put(KEYS.query, encode(Query("f" * 16, topic, 7)), lease),)))

    snapshot = reader.read(with_job.read(KEYS.root), whole=True)

    assert snapshot.query is None
    assert [op for _, op in snapshot.repairs] == [Delete(KEYS.query)]
    assert [text.startswith(f"{KEYS.query} in the store is not on its") for text in snapshot.unreadable] == [True]
