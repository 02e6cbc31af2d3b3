"""What a server answers, whoever it is: HTTP taken apart as it comes, and etcd's answers."""

from __future__ import annotations

import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.rendezvous.dial import resolve
from elaunch.rendezvous.endpoint import Access, Endpoint, Login
from elaunch.rendezvous.etcd import json_codec
from elaunch.rendezvous.etcd.http_client import request_bytes
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import Json, JsonTransport, ResponseStream, Rpc
from elaunch.rendezvous.store import Denied, Put, Rejected, StoreError, Txn, Unavailable
from tests.fuzzing import NESTED, PLAIN, VALUES, bounded
from tests.relay import Listener

ENDPOINT = Endpoint("127.0.0.1", 1)
KV = {
    "key": b64encode(b"/elaunch/job/ctl/leader").decode(),
    "create_revision": "3",
    "mod_revision": "5",
    "value": "YQ==",
}
ANSWER: Json = {
    "header": {"cluster_id": "7", "revision": "9"}, "kvs": [KV], "succeeded": True, "TTL": "3",
    "events": [{"kv": KV}, {"type": "DELETE", "kv": KV}], "token": "abc", "version": "3.5.1",
}  # fmt: skip

HEADS = st.lists(
    st.sampled_from(
        [
            b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200\r\n", b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 \xb2\xb2\xb2 x\r\n",
            b"HTTP/1.1 000 x\r\n", b"HTTP/1.1 204 \r\n", b"Content-Length: 5\r\n", b"Content-Length: \xb2\r\n",
            b"Content-Length: " + b"9" * 5000 + b"\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n",
            b"Connection: close\r\n", b"\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffffffffffffff\r\n",
            b"hello", b"x",
            b"5;a=b\r\n", b"-1\r\n", b"0\r\nTrailer: x\r\n\r\n",
        ]
    )
    | st.binary(max_size=8),
    max_size=8,
).map(b"".join)  # fmt: skip


class Answering:
    """A transport whose server answers every call with the same."""

    def __init__(self, answer: Json) -> None:
        self.answer = answer

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        return str(self.answer.get("version"))

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        return self.answer

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> ResponseStream:
        raise Unavailable("no stream here")

    def close(self) -> None:
        pass


ANSWERS = (
    st.dictionaries(st.sampled_from(sorted(ANSWER)), VALUES, max_size=4).map(lambda changed: {**ANSWER, **changed})
    | st.dictionaries(st.sampled_from(sorted(KV)), PLAIN).map(lambda kv: {**ANSWER, "kvs": [{**KV, **kv}]})
    | st.dictionaries(st.sampled_from(sorted(KV)), PLAIN).map(lambda kv: {**ANSWER, "events": [{"kv": {**KV, **kv}}]})
)


@given(ANSWERS)
def test_whatever_an_etcd_sends_is_a_response_or_the_stores_own_error(answer: Json) -> None:
    store = EtcdStore([ENDPOINT], Access(login=Login("user", "password"), plainly=True), transport=Answering(answer))
    calls = (
        store.check,
        lambda: store.read("/elaunch/"),
        lambda: store.commit(Txn((), (Put("k", "v"),))),
        lambda: store.grant(1, 3),
        lambda: store.keep_alive(1),
        lambda: store.revoke(1),
    )
    with bounded():
        for call in calls:
            try:
                found = call()
            except StoreError as error:
                assert str(error)[:1]  # noqa: PT017
            else:
                assert not isinstance(found, float) or found < 2**64


@given(ANSWERS)
def test_what_a_watch_receives_is_changes_or_one_of_four_errors(answer: Json) -> None:
    with bounded():
        try:
            json_codec.revision(answer), json_codec.cluster(answer), json_codec.compacted(answer)
            json_codec.changes(answer, 0)
        except (AttributeError, KeyError, TypeError, ValueError):
            return


class Server(Listener):
    """A server on loopback that answers every request with the same bytes, and hangs up."""

    def __init__(self) -> None:
        self.answer = b""
        super().__init__(self._say)

    def _say(self, client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(self.answer)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as found:
        yield found


BODIES = (
    VALUES.map(lambda value: json.dumps(value).encode())
    | st.builds(
        lambda name, value, code: json.dumps({name: value, "code": code, "grpc_code": code}).encode(),
        st.sampled_from(["error", "message", "result", "etcdserver", "version"]),
        VALUES,
        PLAIN,
    )
    | st.sampled_from([NESTED.encode(), b'{"error":' * 20_000, b"\xff\xfe", b"", b"[]", b'{"error":{"grpc_code":"x"}}'])
    | st.binary(max_size=50)
)


@given(body=BODIES, status=st.sampled_from([200, 400, 401, 403, 404, 405, 500, 502, 503]))
def test_whatever_a_server_sends_is_json_or_the_stores_own_error(server: Server, body: bytes, status: int) -> None:
    server.answer = b"HTTP/1.1 %d x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body
    store = EtcdStore([server.endpoint], deadline_s=5, transport=JsonTransport())
    for call in (store.check, lambda: store.read("/elaunch/"), lambda: store.keep_alive(1)):
        with bounded():
            try:
                call()
            except StoreError:
                continue
    store.close()


@given(data=HEADS | st.binary(max_size=100))
@example(data=b"HTTP/1.1 100 \r\n\r\n" * 3000)
def test_whatever_bytes_a_server_sends_are_a_response_or_the_stores_own_error(server: Server, data: bytes) -> None:
    server.answer = data
    store = EtcdStore([server.endpoint], deadline_s=5, transport=JsonTransport())
    with bounded(), suppress(StoreError):
        store.read("/elaunch/")
    store.close()


# What fuzzing and reading found, by name.


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        *((b"HTTP/1.1 " + status + b" OK\r\n\r\n", Denied) for status in (b"\xb2\xb2\xb2", b"000", b"2", b"-10")),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n{}", Unavailable),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Unavailable),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, Unavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{", Unavailable),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Denied),
        (b"\x15\x03\x01\x00\x02", Denied),
    ],
)
def test_what_is_no_response_of_http_is_an_error(server: Server, answer: bytes, error: type[StoreError]) -> None:
    server.answer = answer
    store = EtcdStore([server.endpoint], deadline_s=5, transport=JsonTransport())
    with closing(store), pytest.raises(error):
        store.read("/elaunch/")


def test_a_header_cannot_smuggle_in_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        request_bytes("POST", "h:1", "/", {"Authorization": "x\r\nHost: elsewhere"}, b"")


@pytest.mark.parametrize(
    "changed", [{"TTL": "nan"}, {"TTL": 1e999}, {"TTL": True}, {"TTL": "9" * 5000}, {"TTL": 1.5}, {"TTL": 10**400}]
)
def test_a_lease_of_no_number_is_not_kept(changed: Json) -> None:
    store = EtcdStore([ENDPOINT], transport=Answering({**ANSWER, **changed}))

    with pytest.raises(Rejected, match="malformed response"):
        store.keep_alive(1)


@pytest.mark.parametrize("token", ["a\nHost: b", "\u20ac", 7, ["x"], "a b"])
def test_a_token_that_is_no_header_is_not_taken(token: object) -> None:
    access = Access(login=Login("user", "password"), plainly=True)
    store = EtcdStore([ENDPOINT], access, transport=Answering({**ANSWER, "token": token}))

    with pytest.raises(Unavailable, match="not a token"):
        store.read("/elaunch/")


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "\ud800", "a\0b", "\u65e5" * 80])
def test_a_name_that_no_host_has_is_not_found(host: str) -> None:
    with pytest.raises(OSError, match=r"not a host name|not known|resolver"):
        resolve(host, 2379, 5.0)
