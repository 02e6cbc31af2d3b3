"""rendezvous.rules.questions: questions over the store change nothing of the job, whoever writes them."""

from __future__ import annotations

import json

import pytest

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.rules.questions import QUESTION_BYTES_MAX, Question, Topic, answer, ask, read_question
from elaunch.rendezvous.rules.snapshot import Keys, SnapshotReader
from elaunch.rendezvous.store import Delete, KeyEntry, LeaseGone, Put, Txn, View
from elaunch.rendezvous.types import Generation, OpenKind

KEYS = Keys("night/1")
QUESTION = Question("0123456789abcdef", Topic.STATUS, 7)
RUNNING = encode(Generation(0, OpenKind.START, "the job starts"))


def store() -> MemoryStore:
    """A store in which the job runs, and which has the asker's lease."""
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
        "x" * (QUESTION_BYTES_MAX + 1),
        json.dumps({"identity": "0123456789abcdef", "topic": "status"}),
        json.dumps({"identity": "0123456789abcdef", "topic": "shutdown", "lease": 7}),
        json.dumps({"identity": "0123456789abcdef", "topic": "status", "lease": 0}),
        json.dumps({"identity": "0123456789abcdef", "topic": "status", "lease": 1 << 63}),
        json.dumps({"identity": "../../ctl/ended", "topic": "status", "lease": 7}),
    ],
)
def test_what_is_no_question_is_none_and_the_job_is_read_all_the_same(text: str) -> None:
    entries = {KEYS.question: KeyEntry(text, 2, 2), KEYS.generation: KeyEntry(RUNNING, 1, 1)}

    snapshot = SnapshotReader(KEYS).read(View(2, entries), whole=False)

    assert read_question(text) is None
    assert snapshot.question is None
    assert snapshot.unreadable == ()
    assert snapshot.generation == Generation(0, OpenKind.START, "the job starts")


def test_a_question_is_read_as_it_was_asked_and_there_is_one_at_a_time() -> None:
    with_job = store()

    first = with_job.commit(ask(KEYS, QUESTION))
    second = with_job.commit(ask(KEYS, Question("f" * 16, Topic.STACKS, 7)))

    snapshot = SnapshotReader(KEYS).read(with_job.read(KEYS.control), whole=False)
    assert (first.held, second.held) == (True, False)
    assert snapshot.question == QUESTION


def test_question_and_answers_go_with_the_askers_lease_and_a_late_answer_is_not_written() -> None:
    with_job = store()
    with_job.commit(ask(KEYS, QUESTION))

    with_job.commit(answer(KEYS, QUESTION, "node-a-00000001", "{}"))
    answers = with_job.read(KEYS.answers(QUESTION.identity)).entries
    with_job.revoke(7)

    assert list(answers) == [KEYS.answers(QUESTION.identity, "node-a-00000001")]
    assert list(with_job.read("/").entries) == [KEYS.generation]
    with_job.commit(Txn((), (Put(KEYS.question, "another's"),)))
    with pytest.raises(LeaseGone):
        with_job.commit(answer(KEYS, QUESTION, "node-a-00000001", "{}"))


def test_no_agent_watches_the_answers_not_even_the_one_that_leads() -> None:
    key = KEYS.answers(QUESTION.identity, "node-a-00000001")

    assert not key.startswith(KEYS.root)
    # Whatever a job is called, its keys are none of these.
    for run_id in ("?answers", "night/1", "%3Fanswers", "answers"):
        assert not key.startswith(Keys(run_id).root)


@pytest.mark.parametrize("lease", [0, 8])
@pytest.mark.parametrize("topic", [Topic.STATUS, Topic.STOP])
@pytest.mark.parametrize("is_over", [False, True])
def test_a_question_that_is_not_on_its_askers_lease_is_none_and_the_leader_deletes_it(
    lease: int, topic: Topic, is_over: bool
) -> None:
    with_job, reader = store(), SnapshotReader(KEYS)
    with_job.grant(8, 10)
    if is_over:
        with_job.commit(ask(KEYS, QUESTION))
        reader.read(with_job.read(KEYS.root), whole=True)
    with_job.commit(Txn((), (Put(KEYS.question, encode(Question("f" * 16, topic, 7)), lease),)))

    snapshot = reader.read(with_job.read(KEYS.root), whole=True)

    assert snapshot.question is None
    assert [op for _, op in snapshot.mends] == [Delete(KEYS.question)]
    assert [text.startswith(f"{KEYS.question} in the store is not on the") for text in snapshot.unreadable] == [True]
