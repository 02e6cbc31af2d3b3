"""Maps the requests of etcd v3's JSON gateway to calls of the engine, and their results to answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.engine.mvcc import UNBOUNDED, KeyValue, Refused
from elaunch.rendezvous.server.json_codec import (
    Fields,
    Json,
    delete_answer,
    delete_request,
    events_json,
    lease_json,
    put_answer,
    put_request,
    range_answer,
    range_request,
    read_json,
    txn_answer,
    txn_request,
    write_json,
)
from elaunch.rendezvous.store import SHARED

# The version of etcd that this server imitates. Clients read it.
ETCD_VERSION = "3.4.0"
EXHAUSTED, INTERNAL, UNAUTHENTICATED = 8, 13, 16
# The HTTP status for each gRPC status, as in etcd's gateway.
_STATUS = {3: 400, 5: 404, EXHAUSTED: 429, 9: 400, 11: 400, 12: 501, INTERNAL: 500, UNAUTHENTICATED: 401}


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes


class WatchRequest(NamedTuple):
    """A request for a watch; `start_revision` 0 means from now on."""

    key: bytes
    end: bytes
    start_revision: int


class Routes:
    """Answers requests. The caller draws a new `cluster_id` and `member_id` for every new engine."""

    def __init__(self, engine: Engine, cluster_id: int, member_id: int, *, is_shared: bool = False) -> None:
        self._engine = engine
        self._version = f"{ETCD_VERSION}{SHARED if is_shared else ''}"
        self._ids = {"cluster_id": str(cluster_id), "member_id": str(member_id)}
        self._member_id = str(member_id)
        handlers: dict[str, Callable[[Fields], Json]] = {
            "/v3/kv/range": self._range,
            "/v3/kv/put": self._put,
            "/v3/kv/deleterange": self._delete,
            "/v3/kv/txn": self._txn,
            "/v3/kv/compaction": self._compact,
            "/v3/lease/grant": self._grant,
            "/v3/maintenance/status": self._status,
        }
        for name, handler in (
            ("revoke", self._revoke),
            ("keepalive", self._keep_alive),
            ("timetolive", self._time_to_live),
        ):
            handlers[f"/v3/lease/{name}"] = handlers[f"/v3/kv/lease/{name}"] = handler
        self._handlers = handlers

    def answer(self, method: str, path: str, body: bytes) -> Reply | WatchRequest:
        """Run the request and return its answer. The caller must start a watch itself."""
        if (method, path) == ("GET", "/version"):
            return Reply(200, write_json({"etcdserver": ETCD_VERSION, "etcdcluster": ETCD_VERSION, "elaunch": True}))
        if (method, path) == ("GET", "/health"):
            return Reply(200, write_json({"health": "true"}))
        handler = self._handlers.get(path)
        if handler is None and path != "/v3/watch":
            return Reply(404, b"Not Found\n")
        if method != "POST":
            return Reply(405, b"Method Not Allowed\n")
        try:
            fields = read_json(body)
            if handler is None:
                return self._watch(_watch_request(fields))
            return Reply(200, write_json(handler(fields)) + (b"\n" if path.endswith("/keepalive") else b""))
        except Refused as refused:
            return error_reply(refused)

    def created(self) -> bytes:
        """The first line of a watch."""
        return self._line({"header": self._header(self._engine.revision), "created": True})

    def events(self, revision: int, events: Sequence[KeyValue]) -> bytes:
        """A line of a watch: events up to `revision`."""
        return self._line({"header": self._header(revision), "events": events_json(events)})

    def compacted(self, revision: int) -> bytes:
        """The last line of a watch whose next revisions are compacted."""
        return self._line({"header": self._header(0), "canceled": True, "compact_revision": str(revision)})

    def _watch(self, request: WatchRequest) -> Reply | WatchRequest:
        if not request.end or request.end == UNBOUNDED or request.key < request.end:
            return request
        refusal = {"watch_id": "-1", "created": True, "canceled": True, "cancel_reason": "mvcc: watcher range is empty"}
        return Reply(200, self._line({"header": self._header(self._engine.revision), **refusal}))

    def _header(self, revision: int) -> Json:
        return {**self._ids, **({"revision": str(revision)} if revision else {}), "raft_term": "2"}

    def _line(self, result: Json) -> bytes:
        return write_json({"result": result}) + b"\n"

    def _answered(self, fields: Json, revision: int = 0) -> Json:
        return {"header": self._header(revision or self._engine.revision), **fields}

    def _range(self, fields: Fields) -> Json:
        answer = self._engine.range(range_request(fields))
        return self._answered(range_answer(answer), answer.revision)

    def _put(self, fields: Fields) -> Json:
        answer = self._engine.put(put_request(fields))
        return self._answered(put_answer(answer), answer.revision)

    def _delete(self, fields: Fields) -> Json:
        answer = self._engine.delete(delete_request(fields))
        return self._answered(delete_answer(answer), answer.revision)

    def _txn(self, fields: Fields) -> Json:
        answer = self._engine.txn(txn_request(fields))
        return self._answered(txn_answer(answer), answer.revision)

    def _compact(self, fields: Fields) -> Json:
        # Every compaction here is physical: it is complete when it is answered.
        fields.get_bool("physical")
        revision = fields.get_int("revision")
        fields.done()
        return self._answered({}, self._engine.compact(revision))

    def _grant(self, fields: Fields) -> Json:
        lease, ttl_s = fields.get_int("ID"), fields.get_int("TTL")
        fields.done()
        lease, ttl_s = self._engine.grant(lease, ttl_s)
        return self._answered(lease_json(lease, ttl_s, 0, ()))

    def _revoke(self, fields: Fields) -> Json:
        lease = fields.get_int("ID")
        fields.done()
        self._engine.revoke(lease)
        return self._answered({})

    def _keep_alive(self, fields: Fields) -> Json:
        lease = fields.get_int("ID")
        fields.done()
        return {"result": self._answered(lease_json(lease, self._engine.keep_alive(lease), 0, ()))}

    def _time_to_live(self, fields: Fields) -> Json:
        lease, with_keys = fields.get_int("ID"), fields.get_bool("keys")
        fields.done()
        left_s, granted_s, keys = self._engine.time_to_live(lease)
        return self._answered(lease_json(lease, left_s, granted_s, keys if with_keys else ()))

    def _status(self, fields: Fields) -> Json:
        fields.done()
        return self._answered({"version": self._version, "leader": self._member_id, "raftIndex": "1", "raftTerm": "2"})


def error_reply(refused: Refused) -> Reply:
    body = {"error": refused.message, "code": refused.code, "message": refused.message}
    return Reply(_STATUS[refused.code], write_json(body))


def _watch_request(fields: Fields) -> WatchRequest:
    create = fields.get_object("create_request")
    # etcd sends progress notifications only every ten minutes, so a client cannot depend on them.
    create.get_bool("progress_notify")
    key, end, start_revision = create.get_bytes("key"), create.get_bytes("range_end"), create.get_int("start_revision")
    create.done()
    fields.done()
    # An empty key is the smallest key, as in etcd.
    return WatchRequest(key or UNBOUNDED, end, start_revision)
