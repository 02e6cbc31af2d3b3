"""The served store gives the same answers as a real etcd. The tests send the same JSON to both."""

from __future__ import annotations

import random
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from tests.etcd import VERSIONS, Etcd
from tests.harness import slow
from tests.served import Gateway, WatchStream, thread_serving

Json = dict[str, Any]
KEYS = [b"a", b"a/", b"a/1", b"a/2", b"b", b"b/1", b"b0", b"c", b"\xff", b"\xff\xff", b"\0"]
ENDS = [*KEYS, b"a0", b"d", b"\0"]
LEASES = [7, 8, 9, 2**62]
# Long runs meet each of these, and answers without one.
REFUSALS = {
    "",
    "etcdserver: duplicate key given in txn request",
    "etcdserver: key is not provided",
    "etcdserver: lease already exists",
    "etcdserver: mvcc: required revision has been compacted",
    "etcdserver: mvcc: required revision is a future revision",
    "etcdserver: requested lease not found",
    "etcdserver: too large lease TTL",
    "etcdserver: too many operations in txn request",
}
# So long that no lease ends within a test.
TTL_S = 3600


class Pair:
    """A real etcd and the served store, both fresh, so that even their revisions must be equal."""

    def __init__(self, etcd: Gateway, served: Gateway) -> None:
        self._both = (etcd, served)
        self.history: list[str] = []
        self.refusals: set[str] = set()
        self.revision = 1

    def call(self, path: str, body: Json) -> Json:
        """Send a request to both. Returns their answer without what may differ. Fails if the answers differ."""
        self.history.append(f"{path} {body}")
        theirs, ours = (_comparable(*gateway.call(path, body)) for gateway in self._both)
        assert ours == theirs, self.story("etcd answered", theirs, "the served store", ours)
        self.refusals.add(theirs.get("message", ""))
        self.revision = int(theirs.get("header", {}).get("revision", self.revision))
        return theirs

    def watch(self, create: Json) -> tuple[WatchStream, WatchStream]:
        self.history.append(f"watch {create}")
        etcd, served = (gateway.watch(create) for gateway in self._both)
        assert _headless(etcd.created) == _headless(served.created), self.story(etcd.created, served.created)
        return etcd, served

    def story(self, *ends: object) -> str:
        return "\n".join([*self.history[-200:], *map(str, ends)])


@pytest.fixture(params=[slow(VERSIONS[0]), VERSIONS[-1]])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with Etcd(request.param) as etcd, thread_serving() as (_, port):
        host, _, etcd_port = etcd.members[0].endpoint.rpartition(":")
        theirs, ours = Gateway(host, int(etcd_port)), Gateway("127.0.0.1", port)
        yield Pair(theirs, ours)
        theirs.close()
        ours.close()


@pytest.mark.parametrize("seed", [0, slow(1)])
def test_random_requests_are_answered_as_by_a_real_etcd(pair: Pair, seed: int) -> None:
    Player(pair, random.Random(seed)).play(500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_random_requests_are_answered_as_by_a_real_etcd(pair: Pair, seed: int) -> None:
    Player(pair, random.Random(seed)).play(2000)

    assert pair.refusals == REFUSALS


class Player:
    """Sends random requests while watches are open. At the end the watches of both must have reported the same."""

    def __init__(self, pair: Pair, rng: random.Random) -> None:
        self._pair = pair
        self._rng = rng
        self._watches: list[tuple[Json, tuple[WatchStream, WatchStream]]] = []
        self._compacted = 0
        self._requests = [
            *[self._put] * 5,
            *[self._range] * 4,
            *[self._delete] * 2,
            *[self._txn] * 6,
            self._grant,
            self._revoke,
            self._keep_alive,
            self._time_to_live,
        ]

    def play(self, turns: int) -> None:
        for turn in range(turns):
            if turn % 50 == 49:
                self._compact()
            if turn % 40 == 20:
                self._watch()
            path, body = self._rng.choice(self._requests)()
            self._pair.call(path, body)
        self._compare_watches()

    def _put(self) -> tuple[str, Json]:
        return "/v3/kv/put", self._put_body()

    def _range(self) -> tuple[str, Json]:
        return "/v3/kv/range", self._range_body()

    def _delete(self) -> tuple[str, Json]:
        return "/v3/kv/deleterange", self._delete_body()

    def _txn(self) -> tuple[str, Json]:
        return "/v3/kv/txn", {
            "compare": [self._compare_body() for _ in range(self._rng.choice((0, 1, 1, 1, 2, 3)))],
            "success": self._operations(),
            "failure": self._operations(),
        }

    def _grant(self) -> tuple[str, Json]:
        return "/v3/lease/grant", {"ID": self._rng.choice(LEASES), "TTL": self._rng.choice((TTL_S, 10**11))}

    def _revoke(self) -> tuple[str, Json]:
        return self._rng.choice(("/v3/lease/revoke", "/v3/kv/lease/revoke")), {"ID": str(self._rng.choice(LEASES))}

    def _keep_alive(self) -> tuple[str, Json]:
        return "/v3/lease/keepalive", {"ID": self._rng.choice(LEASES)}

    def _time_to_live(self) -> tuple[str, Json]:
        return "/v3/lease/timetolive", {"ID": self._rng.choice(LEASES), "keys": self._maybe()}

    def _compact(self) -> None:
        revision = self._pair.revision
        at = self._rng.choice((self._compacted, revision, revision + 1, self._rng.randint(0, revision)))
        answer = self._pair.call("/v3/kv/compaction", {"revision": str(at), "physical": self._maybe()})
        if "header" in answer:
            self._compacted = at

    def _watch(self) -> None:
        revision = self._pair.revision
        create: Json = {"key": self._key(), **self._end()}
        # etcd 3.4.23 and 3.5.1 do not tell of a deletion at the very revision of the compaction: their fault.
        first = self._rng.choice((0, revision, revision + 2, self._rng.randint(1, revision), self._compacted - 1))
        if first > 0 and first != self._compacted:
            create["start_revision"] = str(first)
        watches = self._pair.watch(create)
        if "canceled" in watches[0].created:
            return
        self._watches.append((create, watches))
        if first <= revision:
            # etcd comes to watches of the past every 100 ms only, and what is compacted meanwhile is lost to them.
            put = self._pair.call("/v3/kv/put", {"key": create["key"] or _text(b"\0"), "value": _text(b"now")})
            if not self._compare_watch(create, watches, int(put["header"]["revision"])):
                self._watches.pop()

    def _compare_watches(self) -> None:
        for key in KEYS:
            # Something at the end for each watch to tell.
            self._pair.call("/v3/kv/put", {"key": _text(key), "value": _text(b"the end")})
        for create, watches in self._watches:
            self._compare_watch(create, watches, self._last_revision(create))
            for watch in watches:
                watch.close()

    def _compare_watch(self, create: Json, watches: tuple[WatchStream, WatchStream], revision: int) -> bool:
        """Check that both watches have reported the same up to `revision`. Returns whether they go on."""
        theirs, ours = ([_headless(event) for event in watch.events_until(revision)] for watch in watches)
        assert ours == theirs, self._pair.story(create, "etcd told", theirs, "the served store", ours)
        return "canceled" not in ours[-1]

    def _last_revision(self, create: Json) -> int:
        """The revision of the last event that a watch will tell."""
        body = {"key": create["key"] or _text(b"\0"), "range_end": create.get("range_end", "")}
        return max(int(kv["mod_revision"]) for kv in self._pair.call("/v3/kv/range", body)["kvs"])

    def _operations(self) -> list[Json]:
        makers = (
            lambda: {"request_put": self._put_body()},
            lambda: {"request_range": self._range_body()},
            lambda: {"request_delete_range": self._delete_body()},
        )
        if self._rng.random() < 0.01:
            return [{"request_range": {"key": _text(b"a")}}] * self._rng.choice((128, 129))
        return [self._rng.choice(makers)() for _ in range(self._rng.choice((0, 1, 1, 2, 3)))]

    def _put_body(self) -> Json:
        body: Json = {"key": self._key(), "value": _text(self._value())}
        if self._rng.random() < 0.3:
            body["lease"] = self._rng.choice((str, int))(self._rng.choice(LEASES))
        if self._maybe():
            body["prev_kv"] = True
        return body

    def _range_body(self) -> Json:
        body: Json = {"key": self._key(), **self._end()}
        if self._rng.random() < 0.3:
            body["limit"] = self._rng.choice((-1, 0, 1, 2, 100))
        if self._rng.random() < 0.3:
            body["revision"] = str(self._rng.randint(max(self._compacted - 2, -1), self._pair.revision + 1))
        for name in ("keys_only", "count_only", "serializable"):
            if self._rng.random() < 0.2:
                body[name] = True
        return body

    def _delete_body(self) -> Json:
        return {"key": self._key(), **self._end(), "prev_kv": self._maybe()}

    def _compare_body(self) -> Json:
        target = self._rng.choice(("VERSION", "CREATE", "MOD", "VALUE", "LEASE"))
        result = self._rng.choice(("EQUAL", "GREATER", "LESS", "NOT_EQUAL", 0, 1, 2, 3))
        body: Json = {"target": target, "result": result, "key": self._key(), **self._end()}
        match target:
            case "VALUE":
                body["value"] = _text(self._value())
            case "LEASE":
                body["lease"] = self._rng.choice((0, *LEASES))
            case "VERSION":
                body["version"] = self._rng.choice((0, 1, 2, 3))
            case _:
                about = (0, self._rng.randint(0, self._pair.revision + 1), self._pair.revision, self._pair.revision - 3)
                body["create_revision" if target == "CREATE" else "mod_revision"] = str(self._rng.choice(about))
        if self._rng.random() < 0.02:
            # Not the target: etcd then compares another number with nothing, where the served store says no.
            del body[self._rng.choice([name for name in body if name != "target"])]
        return body

    def _key(self) -> str:
        return _text(b"" if self._rng.random() < 0.01 else self._rng.choice(KEYS))

    def _end(self) -> Json:
        return {"range_end": _text(self._rng.choice(ENDS))} if self._rng.random() < 0.4 else {}

    def _value(self) -> bytes:
        return self._rng.choice((b"", b"1", b"2", b"10", b"\0\xff"))

    def _maybe(self) -> bool:
        return self._rng.random() < 0.5


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _comparable(status: int, answer: Any) -> Json:
    """An answer without what may differ between two stores."""
    if status != 200:
        # 3.4 says 412 where 3.5 and the served store say 400.
        return {"status": 400 if status == 412 else status, "message": answer["message"], "code": answer["code"]}
    answer = _headless(answer)
    # How much a lease has left changes while we look.
    if "grantedTTL" in answer:
        del answer["TTL"]
        answer["keys"] = sorted(answer.get("keys", []))
    return answer


def _headless(answer: Json) -> Json:
    if "result" in answer:
        return {"result": _headless(answer["result"])}
    if "header" not in answer:
        return answer
    return {**answer, "header": {"revision": answer["header"].get("revision", "0")}}
