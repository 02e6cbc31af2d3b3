"""The requests of etcd v3's JSON gateway that elaunch's client sends, as calls of the engine; responses; watches.

In etcd's JSON bytes are base64, 64-bit numbers are strings, and zero fields are left out. Each revision is serialized
once for all watches of the same keys. A watch whose outlet is full falls behind alone: when there is space again, it
continues from the history.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from elaunch.rendezvous.codec import shown
from elaunch.rendezvous.engine import Engine
from elaunch.rendezvous.etcd import errors
from elaunch.rendezvous.etcd.json_codec import base64, number, range_end, text
from elaunch.rendezvous.etcd.transport import EtcdError, Json
from elaunch.rendezvous.store import (
    SHARED,
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
    Unchanged,
)
from elaunch.strict_json import parse_json

# The version of etcd that this server imitates. Clients read it.
ETCD_VERSION = "3.4.0"
# The HTTP status for each gRPC status, as in etcd's gateway; 400 for all others that the engine returns.
_STATUS = {errors.NOT_FOUND: 404, errors.EXHAUSTED: 429, errors.INTERNAL: 500, errors.UNAUTHENTICATED: 401}


class Reply(NamedTuple):
    """A whole response."""

    status: int
    body: bytes


class WatchRequest(NamedTuple):
    """A request for a watch; `start_revision` 0 means from now on."""

    prefix: str
    start_revision: int


class Routes:
    """Carries out requests. The caller draws a new `cluster_id` and `member_id` for every new engine."""

    def __init__(self, engine: Engine, cluster_id: int, member_id: int, *, is_shared: bool = False) -> None:
        self._engine = engine
        self._version = f"{ETCD_VERSION}{SHARED if is_shared else ''}"
        self._ids = {"cluster_id": str(cluster_id), "member_id": str(member_id)}
        self._handlers: dict[str, Callable[[Json], Json | WatchRequest]] = {
            "/v3/kv/range": self._range,
            "/v3/kv/txn": self._txn,
            "/v3/lease/grant": self._grant,
            "/v3/lease/keepalive": self._keep_alive,
            "/v3/lease/revoke": self._revoke,
            "/v3/maintenance/status": lambda request: self._response(version=self._version),
            "/v3/watch": _watch_request,
        }

    def handle(self, method: str, path: str, body: bytes) -> Reply | WatchRequest:
        """Carry out a request. The caller must start a watch itself."""
        handler = self._handlers.get(path)
        if handler is None:
            return Reply(404, b"Not Found\n")
        if method != "POST":
            return Reply(405, b"Method Not Allowed\n")
        try:
            response = handler(parse_json(body.strip() or b"{}"))
        except EtcdError as error:
            return error_reply(error.code, error.text)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            return error_reply(errors.INVALID, f"elaunch's store does not understand the request: {shown(error)}")
        except Exception:
            # A bug in this server: this request fails, and the store continues for all others.
            traceback.print_exc()
            return error_reply(errors.INTERNAL, "the store failed; its own output has the traceback")
        return response if isinstance(response, WatchRequest) else Reply(200, _written(response))

    def created(self) -> bytes:
        """The first line of a watch."""
        return self._line(self._engine.revision, created=True)

    def events(self, revision: int, changes: list[Changes]) -> bytes:
        """A line of a watch: changes up to `revision`."""
        events = [_event(each.revision, key, entry) for each in changes for key, entry in each.entries.items()]
        return self._line(revision, events=events)

    def compacted(self, revision: int) -> bytes:
        """The last line of a watch whose next revisions are compacted."""
        return self._line(0, canceled=True, compact_revision=str(revision))

    def _line(self, revision: int, **fields: Any) -> bytes:
        return _written({"result": {"header": self._header(revision), **fields}}) + b"\n"

    def _header(self, revision: int) -> Json:
        return {**self._ids, **({"revision": str(revision)} if revision else {}), "raft_term": "2"}

    def _response(self, **fields: Any) -> Json:
        return {"header": self._header(self._engine.revision), **fields}

    def _range(self, request: Json) -> Json:
        view = self._engine.read(_prefix(request))
        return self._response(kvs=[_kv(key, entry) for key, entry in view.entries.items()])

    def _txn(self, request: Json) -> Json:
        # A read is a placeholder in a transaction that writes nothing: its result is unused.
        branches = (request.get(name, ()) for name in ("success", "failure"))
        then, otherwise = (tuple(_op(op) for op in branch if "request_range" not in op) for branch in branches)
        txn = Txn(tuple(map(_guard, request.get("compare", ()))), then, otherwise)
        return self._response(succeeded=self._engine.commit(txn).held)

    def _grant(self, request: Json) -> Json:
        lease = _lease(request)
        return self._response(ID=str(lease), TTL=str(self._engine.grant(lease, _number(request, "TTL"))))

    def _keep_alive(self, request: Json) -> Json:
        lease = _lease(request)
        ttl_s = self._engine.keep_alive(lease)
        return {"result": self._response(ID=str(lease), **({"TTL": str(ttl_s)} if ttl_s else {}))}

    def _revoke(self, request: Json) -> Json:
        self._engine.revoke(_lease(request))
        return self._response()


def error_reply(code: int, text: str) -> Reply:
    return Reply(_STATUS.get(code, 400), _written({"error": text, "code": code, "message": text}))


def _written(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _watch_request(request: Json) -> WatchRequest:
    create = request["create_request"]
    return WatchRequest(_prefix(create), _number(create, "start_revision"))


def _guard(compare: Json) -> TxnGuard:
    """The guard that a comparison encodes. Raises ValueError for one that elaunch's client does not send."""
    is_range = "range_end" in compare
    match compare["target"], compare["result"]:
        case "CREATE", "EQUAL" if _number(compare, "create_revision") == 0:
            return Empty(_prefix(compare)) if is_range else Absent(_text(compare, "key"))
        case "CREATE", "GREATER" if _number(compare, "create_revision") == 0 and not is_range:
            return Present(_text(compare, "key"))
        case "MOD", "EQUAL" if not is_range:
            return Unchanged(_text(compare, "key"), _number(compare, "mod_revision"))
        case "MOD", "LESS" if is_range:
            return NoneNewer(_prefix(compare), _number(compare, "mod_revision") - 1)
    raise ValueError(f"comparison {shown(compare)}")


def _op(op: Json) -> Op:
    if "request_put" in op:
        put = op["request_put"]
        return Put(_text(put, "key"), _text(put, "value"), _number(put, "lease"))
    delete = op["request_delete_range"]
    return Delete(_text(delete, "key"), _text(delete, "range_end"))


def _prefix(fields: Json) -> str:
    """The prefix of all keys of a range. Raises ValueError for any other range."""
    start, end = text(fields.get("key", "")), text(fields.get("range_end", ""))
    if (start, end) == ("\0", "\0"):
        return ""
    if not start or end.encode("utf-8", "surrogateescape") != range_end(start):
        raise ValueError("a range that is not a prefix")
    return start


def _lease(fields: Json) -> int:
    lease = _number(fields, "ID")
    if lease < 1:
        raise ValueError("a lease without an id")
    return lease


def _text(fields: Json, name: str) -> str:
    return text(fields.get(name, ""))


def _number(fields: Json, name: str) -> int:
    return number(fields.get(name, 0))


def _event(revision: int, key: str, entry: KeyEntry | None) -> Json:
    if entry is None:
        return {"type": "DELETE", "kv": {"key": base64(key), "mod_revision": str(revision)}}
    return {"kv": _kv(key, entry)}


def _kv(key: str, entry: KeyEntry) -> Json:
    kv = {
        "key": base64(key),
        "create_revision": str(entry.create_revision),
        "mod_revision": str(entry.mod_revision),
        "value": base64(entry.value),
    }
    return {**kv, "lease": str(entry.lease)} if entry.lease else kv


# Limits of one read from the history for a watch that is behind.
_BATCH_REVISIONS = 1000
_BATCH_BYTES = 256 << 10


class Outlet(Protocol):
    """The connection to which a watch sends its lines."""

    def has_space(self) -> bool: ...

    def send(self, line: bytes) -> None: ...


class Watcher:
    """One watch. `next_revision` is the next that it must send. While it is `behind`, it gets no new events."""

    def __init__(self, prefix: str, next_revision: int, outlet: Outlet) -> None:
        self.prefix = prefix
        self.next_revision = next_revision
        self.outlet = outlet
        self.behind = True


class Watchers:
    """All watches. `notify` is the engine's listener. Call `catch_up` whenever an outlet has space again."""

    def __init__(self, engine: Engine, routes: Routes) -> None:
        self._engine = engine
        self._routes = routes
        self._watching: dict[str, set[Watcher]] = {}

    def add(self, prefix: str, start_revision: int, outlet: Outlet) -> Watcher:
        """Begin a watch at `start_revision`, 0 for now. Events since then are sent immediately, if there is space."""
        watcher = Watcher(prefix, start_revision or self._engine.revision + 1, outlet)
        self._watching.setdefault(prefix, set()).add(watcher)
        self.catch_up(watcher)
        return watcher

    def remove(self, watcher: Watcher) -> None:
        """End a watch. One that has ended already is no error."""
        same = self._watching.get(watcher.prefix, set())
        same.discard(watcher)
        if not same:
            self._watching.pop(watcher.prefix, None)

    def notify(self, changes: Changes) -> None:
        for prefix, watchers in self._watching.items():
            if not (seen := changes.under(prefix)):
                continue
            line = self._routes.events(changes.revision, [seen])
            for watcher in watchers:
                if watcher.behind or watcher.next_revision > changes.revision:
                    continue
                if watcher.outlet.has_space():
                    watcher.outlet.send(line)
                else:
                    watcher.next_revision = changes.revision
                    watcher.behind = True

    def catch_up(self, watcher: Watcher) -> None:
        """Send the events that a watch has missed, until it is up to date or its outlet is full."""
        while watcher.behind and watcher.outlet.has_space():
            history = self._engine.since(watcher.next_revision, _BATCH_REVISIONS)
            if history is None:
                watcher.outlet.send(self._routes.compacted(self._engine.first_revision))
                watcher.behind = False
                self.remove(watcher)
                return
            found: list[Changes] = []
            size = 0
            for changes in history:
                if seen := changes.under(watcher.prefix):
                    found.append(seen)
                    size += sum(len(entry.value) for entry in seen.entries.values() if entry)
                watcher.next_revision = changes.revision + 1
                # Never send a part of a revision: the client would take it for the whole.
                if size > _BATCH_BYTES:
                    break
            if found:
                watcher.outlet.send(self._routes.events(self._engine.revision, found))
            watcher.behind = bool(history) and watcher.next_revision <= self._engine.revision
