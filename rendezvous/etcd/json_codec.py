"""The store's types as etcd's requests and responses, in the JSON form of its gateway."""

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
    Changes,
    Delete,
    Empty,
    KeyEntry,
    NoneNewer,
    Op,
    Present,
    Put,
    Txn,
    TxnGuard,
    TxnResponse,
    Unchanged,
    View,
)

# A read of no keys.
_NOTHING: Json = {"key": "AA==", "count_only": True}
_INT64 = re.compile(r"-?[0-9]{1,20}")


def range_end(prefix: str) -> bytes:
    """The first key after all those that start with `prefix` (UTF-8 has no byte 0xff, so it always exists)."""
    raw = _raw(prefix)
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"


def read(prefix: str) -> Json:
    """A linearizable read of all keys under a prefix.

    Never put it into a transaction: an etcd before 3.5.5 panics on a read-only transaction whose client disconnected
    (etcd issue 14110), so clients that give up on a slow server would crash it.
    """
    return _range(prefix)


def view(response: Json) -> View:
    return View(revision(response), {text(kv.get("key", "")): _entry(kv) for kv in response.get("kvs", ())})


def commit(txn: Txn) -> Json:
    then, otherwise = [_op(op) for op in txn.then], [_op(op) for op in txn.otherwise]
    if not then and not otherwise:
        # Without operations etcd runs a transaction as a serializable read, on this member, which may be behind.
        then = otherwise = [{"request_range": _count(txn)}]
    return {"compare": [_compare(guard) for guard in txn.guards], "success": then, "failure": otherwise}


def _count(txn: Txn) -> Json:
    """A read that returns no values, so it does not trigger the panic that `read` describes.

    It counts the keys that a guard compares: a user may have a role for one prefix only, and may read nothing else.
    """
    for guard in txn.guards:
        name = guard.prefix if isinstance(guard, (Empty, NoneNewer)) else guard.key
        if name:
            return {"key": base64(name), "count_only": True}
    return _NOTHING


def committed(response: Json) -> TxnResponse:
    return TxnResponse(response.get("succeeded") is True, revision(response))


def grant(lease: int, ttl_s: float) -> Json:
    """The request for a lease. etcd's leases last whole seconds."""
    return {"ID": str(lease), "TTL": str(ceil(ttl_s))}


def lease(lease: int) -> Json:
    """The request that keeps a lease alive, or revokes it."""
    return {"ID": str(lease)}


def seconds_left(response: Json) -> float:
    """The seconds in the response to a keep-alive; 0 if the lease has ended."""
    return float(number(response.get("TTL", 0)))


def watch(prefix: str, after: int | None) -> Json:
    """The request for a watch that repeats revision `after` and then reports all later ones; with None, from now on.

    It begins at `after` itself, not at the next revision: etcd lets a watch begin exactly at the compacted revision,
    but never reports what that revision deleted. A request from one revision earlier gets "compacted" instead.
    """
    if after is None:
        return {"create_request": _range(prefix)}
    return {"create_request": {**_range(prefix), "start_revision": str(max(after, 1))}}


def changes(response: Json, after: int) -> list[Changes]:
    """The changes after revision `after` in a watch's response, one for each revision; a response has whole revisions.

    Every function here that reads a response may raise AttributeError, KeyError, TypeError or ValueError: the response
    is then not etcd's.
    """
    events = (event for event in response.get("events", ()) if _written_at(event) > after)
    return [
        Changes(at, {text(event["kv"]["key"]): _event(event) for event in group})
        for at, group in groupby(events, _written_at)
    ]


def compacted(response: Json) -> bool:
    """Whether etcd ended the watch because its revisions were compacted."""
    return number(response.get("compact_revision", 0)) > 0


def revision(response: Json) -> int:
    """The store's revision as of this response."""
    return number(response.get("header", {}).get("revision", 0))


def cluster(response: Json) -> str:
    """The id of the cluster that responded; "" if the response does not have it."""
    return str(response.get("header", {}).get("cluster_id", ""))


def _range(prefix: str) -> Json:
    return {"key": base64(prefix or "\0"), "range_end": b64encode(range_end(prefix)).decode()}


def _compare(guard: TxnGuard) -> Json:
    match guard:
        case Absent(key):
            return {"key": base64(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        case Present(key):
            return {"key": base64(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"}
        case Unchanged(key, mod_revision):
            return {"key": base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(mod_revision)}
        case Empty(prefix):
            # On a range the comparison must hold for every key, and no key was created at revision 0.
            return {**_range(prefix), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        case NoneNewer(prefix, newest):
            return {**_range(prefix), "target": "MOD", "result": "LESS", "mod_revision": str(newest + 1)}


def _op(op: Op) -> Json:
    match op:
        case Put(key, value, lease):
            put = {"key": base64(key), "value": base64(value)}
            return {"request_put": {**put, "lease": str(lease)} if lease else put}
        case Delete(key, ""):
            return {"request_delete_range": {"key": base64(key)}}
        case Delete(key, end):
            return {"request_delete_range": {"key": base64(key), "range_end": base64(end)}}


def _entry(kv: Json) -> KeyEntry:
    return KeyEntry(
        text(kv.get("value", "")),
        number(kv["create_revision"]),
        number(kv["mod_revision"]),
        number(kv.get("lease", 0)),
    )


def _event(event: Json) -> KeyEntry | None:
    return None if event.get("type") == "DELETE" else _entry(event["kv"])


def _written_at(event: Json) -> int:
    return number(event["kv"]["mod_revision"])


def number(value: Any) -> int:
    """A 64-bit number, which etcd's JSON holds as text. Raises ValueError."""
    # int() would also take a float and true, and raise another error for infinity.
    if type(value) is int or (type(value) is str and _INT64.fullmatch(value)):
        found = int(value)
        if -(2**63) <= found < 2**63:
            return found
    raise ValueError(f"{shown(value)} is not a 64-bit number")


# Values of other writers may not be UTF-8. They are kept as they are, so that the record's reader can refuse them.
def base64(text: str) -> str:
    """A key or a value, as etcd's JSON holds it."""
    return b64encode(_raw(text)).decode("ascii")


def text(base64: str) -> str:
    """The text that `base64` encodes. Raises TypeError and ValueError."""
    return b64decode(base64).decode("utf-8", "surrogateescape")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
