"""rendezvous.rules.trimming: a transaction that is too large for a store is shortened until nothing can be cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules import transactions
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.table_codec import decode_table, encode_table
from elaunch.rendezvous.rules.trimming import content_bytes, trimmed
from elaunch.rendezvous.store import Put, Txn
from elaunch.rendezvous.types import Failure, FailureKind, Outcome, OutcomeKind, Terms
from tests.unit.agent.job_world import KEYS, A, B, running

TEXT = "".join(f"line {number}\n" for number in range(10_000))
FAILED = Failure(
    *(FailureKind.EXCEPTION, 0, B.node_id, B.host, 1, 0, 7, 1, f"raised ValueError: {TEXT}"),
    exception="ValueError", frame="/home/u/t.py:3 in f", traceback=TEXT, tail=TEXT, log_path=f"/logs/{'x' * 3000}",
)  # fmt: skip
ENDED = Outcome(OutcomeKind.FAILED, TEXT, 0, 0, 3, FAILED)


def with_texts() -> dict[str, Txn]:
    """Every kind that carries a text."""
    world = running(A, B)
    before = world.snapshot
    made = {
        "fail": transactions.fail(before, B, FAILED),
        "complete": transactions.complete(before, B, FAILED)[-1],
        "end": transactions.end_job(before, ENDED),
        "leave": transactions.leave(before, B, opens=True, why=TEXT),
        "start": transactions.start_run(Snapshot(KEYS), Terms(command=TEXT), A, 1),
    }
    world.fail(FailureKind.SIGNAL)
    world.join(A, B)
    seal = world.look().txn
    assert seal
    table = decode_table(seal.then[0].value)  # type: ignore[union-attr]
    sealed = replace(seal.then[0], value=encode_table(replace(table, reason=TEXT)))  # type: ignore[arg-type]
    made["seal"] = replace(seal, then=(sealed, *seal.then[1:]))
    return made


@pytest.mark.parametrize("what", ["fail", "complete", "end", "leave", "start", "seal"])
def test_each_time_it_is_shorter_until_there_is_nothing_to_cut(what: str) -> None:
    txn: Txn | None = with_texts()[what]
    assert txn
    kept = txn.guards, [op.key for op in (*txn.then, *txn.otherwise)]

    sizes = []
    while txn is not None:
        sizes.append(content_bytes(txn))
        assert (txn.guards, [op.key for op in (*txn.then, *txn.otherwise)]) == kept
        txn = trimmed(txn, 1 << 20)

    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) > 1
    assert sizes[-1] < 4 << 10


def test_it_is_as_short_as_was_asked_for_and_keeps_what_it_can() -> None:
    complete = with_texts()["complete"]

    shorter = trimmed(complete, 12 << 10)

    assert shorter
    assert (4 << 10) < content_bytes(shorter) <= 12 << 10
    (record,) = (op for op in shorter.then if isinstance(op, Put))
    failure = decode(Failure, record.value)
    assert failure.traceback.startswith("line 0\n")
    assert "are left out here" in failure.traceback
    assert failure.is_cut


def test_who_failed_and_how_is_never_cut_away() -> None:
    shortest = with_texts()["fail"]
    while shorter := trimmed(shortest, 1):
        shortest = shorter

    (record,) = (op for op in shortest.then if isinstance(op, Put) and "/failures/" in op.key)
    failure = decode(Failure, record.value)
    assert (failure.rank, failure.host, failure.kind) == (FAILED.rank, FAILED.host, FAILED.kind)
    assert failure.message.startswith("raised ValueError: line 0")


def test_where_no_text_can_be_cut_there_is_no_shorter_one() -> None:
    world = running(A, B)

    assert trimmed(transactions.report_done(world.snapshot, B, 0), 10) is None
    assert trimmed(Txn(()), 10) is None
    assert trimmed(Txn((), (Put(KEYS.failure(0, "x"), "no record" * 1000),)), 10) is None


def test_a_text_that_was_trimmed_is_read_again() -> None:
    end = with_texts()["end"]

    shorter = trimmed(end, 3 << 10)

    assert shorter
    assert isinstance(shorter.then[0], Put)
    ended = decode(Outcome, shorter.then[0].value)
    assert ended.failure
    assert ended.failure.is_cut
    assert encode(ended) == shorter.then[0].value
