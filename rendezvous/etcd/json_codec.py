"""The store's types as etcd's requests and answers, in the JSON form of its gateway."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from itertools import groupby
from math import ceil
from typing import Any

from elaunch.rendezvous.codec import shown
from elaunch.rendezvous.etcd.transport import Json
from elaunch.rendezvous.store import (
    Absent,
    Answer,
    Changes,
    Delete,
    Empty,
    Entry,
    Guard,
    NoneNewer,
    Op,
    Present,
    Put,
    Txn,
    Unchanged,
    View,
)

# A read of no keys, for the revision alone.
_NOTHING: Json = {"key": "AA==", "count_only": True}
_INT64 = re.compile(r"-?[0-9]{1,20}")


def range_end(prefix: str) -> bytes:
    """The first key after all those that start with `prefix` (UTF-8 has no byte 0xff, so it always exists)."""
    raw = _raw(prefix)
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"


def read(prefix: str | None, at: int = 0) -> Json:
    """All keys under a prefix as of revision `at`, 0 for now, agreed upon by the members; none, for the revision alone.

    Never several in one transaction: of one that only reads, an etcd before 3.5.5 panics when the client has left
    (etcd 14110), so that clients who give up a slow server would end it.
    """
    if prefix is None:
        return _NOTHING
    return {**_range(prefix), "revision": str(at)} if at else _range(prefix)


def view(answer: Json) -> View:
    """What `read` brought."""
    return View(revision(answer), {_text(kv.get("key", "")): _entry(kv) for kv in answer.get("kvs", ())})


def commit(txn: Txn) -> Json:
    """A transaction."""
    then, otherwise = [_op(op) for op in txn.then], [_op(op) for op in txn.otherwise]
    if not then and not otherwise:
        # etcd answers a transaction without any operation from the member at hand, which may be behind.
        then = otherwise = [{"request_range": _count(txn)}]
    return {"compare": [_compare(guard) for guard in txn.guards], "success": then, "failure": otherwise}


def _count(txn: Txn) -> Json:
    """A read that looks at no value, so it cannot be what a transaction panics of (see `read`).

    It counts what a guard compares: a user who has a role for a prefix may read nothing else.
    """
    for guard in txn.guards:
        name = guard.prefix if isinstance(guard, (Empty, NoneNewer)) else guard.key
        if name:
            return {"key": b64encode(_raw(name)).decode(), "count_only": True}
    return _NOTHING


def committed(answer: Json) -> Answer:
    """What became of a transaction."""
    return Answer(answer.get("succeeded") is True, revision(answer))


def grant(lease: int, ttl_s: float) -> Json:
    """etcd's leases last whole seconds."""
    return {"ID": str(lease), "TTL": str(ceil(ttl_s))}


def lease(lease: int) -> Json:
    """A lease to be kept alive or revoked."""
    return {"ID": str(lease)}


def seconds_left(answer: Json) -> float:
    """What a keep-alive brought; 0 where the lease has ended."""
    return float(_number(answer.get("TTL", 0)))


def watch(prefix: str, after: int | None) -> Json:
    """A watch that tells what `after` wrote, again, and all that came later; or, for None, what comes from now on.

    From `after` itself, not from the revision behind it: etcd lets a watch begin at the very revision that was
    compacted, and what that one deleted is then never told. So it says "compacted" in time.
    """
    if after is None:
        return {"create_request": _range(prefix)}
    return {"create_request": {**_range(prefix), "start_revision": str(max(after, 1))}}


def changes(answer: Json, after: int) -> list[Changes]:
    """What a watch's answer tells beyond `after`, revision by revision; etcd never splits one over two answers.

    All functions here that read answers raise AttributeError, KeyError, TypeError or ValueError if etcd did not write
    the answer.
    """
    events = (event for event in answer.get("events", ()) if _written_at(event) > after)
    return [
        Changes(at, {_text(event["kv"]["key"]): _event(event) for event in group})
        for at, group in groupby(events, _written_at)
    ]


def compacted(answer: Json) -> bool:
    """Whether the watch was ended because its revisions are compacted away."""
    return _number(answer.get("compact_revision", 0)) > 0


def revision(answer: Json) -> int:
    """The store's revision as of this answer."""
    return _number(answer.get("header", {}).get("revision", 0))


def cluster(answer: Json) -> str:
    """Which cluster answered; "" where the answer does not say."""
    return str(answer.get("header", {}).get("cluster_id", ""))


def _range(prefix: str) -> Json:
    return {"key": _base64(_raw(prefix) or b"\0"), "range_end": _base64(range_end(prefix))}


def _compare(guard: Guard) -> Json:
    match guard:
        case Absent(key):
            return {"key": _key(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        case Present(key):
            return {"key": _key(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"}
        case Unchanged(key, mod_revision):
            return {"key": _key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(mod_revision)}
        case Empty(prefix):
            # On a range the comparison must hold for every key there is, and none was created at 0.
            return {**_range(prefix), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        case NoneNewer(prefix, newest):
            return {**_range(prefix), "target": "MOD", "result": "LESS", "mod_revision": str(newest + 1)}


def _op(op: Op) -> Json:
    match op:
        case Put(key, value, lease):
            put = {"key": _key(key), "value": _base64(_raw(value))}
            return {"request_put": {**put, "lease": str(lease)} if lease else put}
        case Delete(key, ""):
            return {"request_delete_range": {"key": _key(key)}}
        case Delete(key, end):
            return {"request_delete_range": {"key": _key(key), "range_end": _key(end)}}


def _entry(kv: Json) -> Entry:
    return Entry(
        _text(kv.get("value", "")),
        _number(kv["create_revision"]),
        _number(kv["mod_revision"]),
        _number(kv.get("lease", 0)),
    )


def _event(event: Json) -> Entry | None:
    return None if event.get("type") == "DELETE" else _entry(event["kv"])


def _written_at(event: Json) -> int:
    return _number(event["kv"]["mod_revision"])


def _number(value: Any) -> int:
    """A 64-bit number, which etcd's JSON holds as text. Raises ValueError."""
    # int() would also take a float and true, and raise another error for infinity.
    if type(value) is int or (type(value) is str and _INT64.fullmatch(value)):
        number = int(value)
        if -(2**63) <= number < 2**63:
            return number
    raise ValueError(f"{shown(value)} is no 64-bit number")


# What others wrote may be no UTF-8: kept as it is, so that the record's reader can refuse it.
def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(base64: str) -> str:
    return b64decode(base64).decode("utf-8", "surrogateescape")


def _key(key: str) -> str:
    return _base64(_raw(key))


def _base64(raw: bytes) -> str:
    return b64encode(raw).decode("ascii")
