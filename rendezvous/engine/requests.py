"""The requests of etcd v3 that a rendezvous uses, and their answers."""

# Named tuples: defining a data class takes four times as long, and every job on one node pays for that at its start.

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from elaunch.rendezvous.engine.mvcc import KeyValue


class RangeRequest(NamedTuple):
    """Read the keys from `key` up to but without `end`, or only `key` if `end` is empty; `revision` 0 is now."""

    key: bytes
    end: bytes = b""
    limit: int = 0
    revision: int = 0
    keys_only: bool = False
    count_only: bool = False


class PutRequest(NamedTuple):
    key: bytes
    value: bytes = b""
    lease: int = 0
    prev_kv: bool = False


class DeleteRequest(NamedTuple):
    key: bytes
    end: bytes = b""
    prev_kv: bool = False


OpRequest = RangeRequest | PutRequest | DeleteRequest


class Target(IntEnum):
    """The property of a key that is compared; the numbers are etcd's."""

    VERSION = 0
    CREATE = 1
    MOD = 2
    VALUE = 3
    LEASE = 4


class Result(IntEnum):
    """The result that the comparison must have; the numbers are etcd's."""

    EQUAL = 0
    GREATER = 1
    LESS = 2
    NOT_EQUAL = 3


class Compare(NamedTuple):
    """A condition on every key of a range; `value` is bytes for VALUE, else a number."""

    target: Target
    result: Result
    key: bytes
    end: bytes
    value: bytes | int


class TxnRequest(NamedTuple):
    compare: tuple[Compare, ...] = ()
    success: tuple[OpRequest, ...] = ()
    failure: tuple[OpRequest, ...] = ()


class RangeAnswer(NamedTuple):
    """`total` counts the whole range; `more` says whether `limit` left some keys out."""

    revision: int
    kvs: Sequence[KeyValue]
    more: bool
    total: int


class PutAnswer(NamedTuple):
    revision: int
    prev_kv: KeyValue | None


class DeleteAnswer(NamedTuple):
    revision: int
    deleted: int
    prev_kvs: Sequence[KeyValue]


OpAnswer = RangeAnswer | PutAnswer | DeleteAnswer


class TxnAnswer(NamedTuple):
    revision: int
    succeeded: bool
    answers: tuple[OpAnswer, ...]
