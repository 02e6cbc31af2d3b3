"""Cuts the texts of a transaction that is too large for the store, so that its keys and numbers can be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.limits import keep_ends, keep_head, keep_tail
from elaunch.rendezvous.rules.table_codec import decode_table, encode_table
from elaunch.rendezvous.store import Op, Put, Txn
from elaunch.rendezvous.types import Failure, Generation, Outcome, Terms

# The size of each text, try by try. A traceback or output of a few words is useless, so it is dropped then.
_TEXT_BYTES = (16 << 10, 4 << 10, 1 << 10, 256, 64)
_STORY_BYTES_MIN = 1 << 10


def trimmed(txn: Txn, bytes_max: int) -> Txn | None:
    """The same transaction with shorter texts: `bytes_max` at most if possible, but always shorter than before.

    None if no text is left to cut. Guards, keys and numbers do not change.
    """
    before = content_bytes(txn)
    wanted = min(bytes_max, before - 1)
    shortest = txn
    for text_bytes in _TEXT_BYTES:
        shortest = _with_texts(txn, text_bytes)
        if content_bytes(shortest) <= wanted:
            return shortest
    return shortest if content_bytes(shortest) < before else None


def content_bytes(txn: Txn) -> int:
    """Bytes of the transaction's keys and values. The wire format adds a few bytes for each."""
    guards = sum(len(getattr(guard, "key", getattr(guard, "prefix", "")).encode()) for guard in txn.guards)
    return guards + sum(len(word.encode()) for op in (*txn.then, *txn.otherwise) for word in _words(op))


def _words(op: Op) -> tuple[str, str]:
    return (op.key, op.value) if isinstance(op, Put) else (op.key, op.end)


def _with_texts(txn: Txn, text_bytes: int) -> Txn:
    then, otherwise = (tuple(_shortened(op, text_bytes) for op in ops) for ops in (txn.then, txn.otherwise))
    return replace(txn, then=then, otherwise=otherwise)


def _shortened(op: Op, text_bytes: int) -> Op:
    shorten = _shortener(op.key) if isinstance(op, Put) else None
    if shorten is None or not isinstance(op, Put):
        return op
    try:
        value = shorten(op.value, text_bytes)
    except ValueError:
        # The value is no record of the key's kind, so it is unknown what may be cut.
        return op
    return replace(op, value=value) if len(value) < len(op.value) else op


def _shortener(key: str) -> Callable[[str, int], str] | None:
    match key.split("/"):
        case [*_, "failures", _, _]:
            return lambda value, text_bytes: encode(_failure(decode(Failure, value), text_bytes))
        case [*_, "ctl", "ended"]:
            return _ended
        case [*_, "ctl", "generation"]:
            return _generation
        case [*_, "ctl", "table", _]:
            return _table
        case [*_, "ctl", "spec"]:
            return _spec
    return None


def _failure(failure: Failure, text_bytes: int) -> Failure:
    story_bytes = text_bytes if text_bytes >= _STORY_BYTES_MIN else 0
    short = replace(
        failure,
        message=keep_head(text_bytes).of(failure.message),
        exception=keep_head(text_bytes).of(failure.exception),
        frame=keep_head(text_bytes).of(failure.frame),
        traceback=keep_ends(story_bytes).of(failure.traceback),
        tail=keep_tail(story_bytes).of(failure.tail),
        log_path=keep_head(text_bytes).of(failure.log_path),
        error_file=keep_head(text_bytes).of(failure.error_file),
    )
    return failure if short == failure else replace(short, is_cut=True)


def _ended(value: str, text_bytes: int) -> str:
    outcome = decode(Outcome, value)
    failure = _failure(outcome.failure, text_bytes) if outcome.failure else None
    first = _failure(outcome.first, text_bytes) if outcome.first else None
    return encode(replace(outcome, reason=keep_head(text_bytes).of(outcome.reason), failure=failure, first=first))


def _generation(value: str, text_bytes: int) -> str:
    generation = decode(Generation, value)
    return encode(replace(generation, cause=keep_head(text_bytes).of(generation.cause)))


def _table(value: str, text_bytes: int) -> str:
    table = decode_table(value)
    return encode_table(replace(table, reason=keep_head(text_bytes).of(table.reason)))


def _spec(value: str, text_bytes: int) -> str:
    terms = decode(Terms, value)
    return encode(replace(terms, command=keep_head(text_bytes).of(terms.command)))
