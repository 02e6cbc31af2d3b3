"""Transports: an HTTP server that is no etcd, the JSON codec, and errors of a connection."""

from __future__ import annotations

import base64
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from elaunch.rendezvous.dial import Deadline
from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd import json_codec
from elaunch.rendezvous.etcd.discovery import FoundStore
from elaunch.rendezvous.etcd.http_client import ClientConnection, connection_error
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import GatewayOff, Json, JsonTransport
from elaunch.rendezvous.store import Absent, Denied, OwnLimit, Rejected, StoreError, Txn, Unavailable
from tests.harness import DEADLINE_S
from tests.relay import web_server

NO_ETCD = r"^what listens at .* is not an etcd: it answers /version with HTTP status "


def check(endpoint: Endpoint) -> None:
    with closing(JsonTransport()) as transport:
        transport.version(endpoint, "", 10)


@pytest.mark.parametrize("posts", [False, True])
@pytest.mark.parametrize(
    ("status", "version"),
    [
        (404, b"<html>File not found</html>"),
        (404, b'{"error": "no such page"}'),
        (200, b"<html>Welcome</html>"),
        (200, b'{"gitVersion": "v1.30"}'),
        (302, b""),
    ],
)
def test_a_web_server_is_reported_as_no_etcd(status: int, version: bytes, *, posts: bool) -> None:
    with web_server(status, version, posts=posts) as endpoint, pytest.raises(Denied, match=NO_ETCD) as denied:
        check(endpoint)

    assert not isinstance(denied.value, GatewayOff)
    assert "gateway" not in str(denied.value)


@pytest.mark.parametrize("token", ["", "the token of the job"])
@pytest.mark.parametrize("expects_ours", [False, True])
def test_nothing_else_is_logged_about_a_web_server_whatever_was_expected(token: str, *, expects_ours: bool) -> None:
    logged: list[str] = []

    with web_server(404, b"File not found") as endpoint:
        store = FoundStore(endpoint, token, Access(), 10, expects_ours=expects_ours, log=logged.append)
        with closing(store), pytest.raises(Denied, match=NO_ETCD):
            store.check()

    assert logged == []


def test_an_etcd_without_its_gateway_is_denied_with_the_option_that_starts_it() -> None:
    version = b'{"etcdserver": "3.5.1", "etcdcluster": "3.5.0"}'

    with web_server(200, version) as endpoint, pytest.raises(GatewayOff, match=f"gateway of {endpoint} is off"):
        check(endpoint)


BY_STATUS = [
    *((401, Denied), (403, Denied), (404, GatewayOff)),
    *((413, Denied), (429, Unavailable), (502, Rejected)),
]


@pytest.mark.parametrize(("status", "error"), BY_STATUS)
@pytest.mark.parametrize("body", [b"<html>no</html>", b'{"message": "no"}', b'{"error": "no", "code": 499}'])
def test_a_proxys_response_is_judged_by_its_status_in_html_and_in_json(
    status: int, error: type[StoreError], body: bytes
) -> None:
    with (
        web_server(status, body, posts=True) as endpoint,
        closing(EtcdStore([endpoint])) as store,
        pytest.raises(StoreError) as raised,
    ):
        store.read("/elaunch/")

    assert type(raised.value) is error


KEY = base64.b64encode(b"/a").decode()


def event(revision: int, **kv: str) -> Json:
    return {"kv": {"key": KEY, "create_revision": "1", "mod_revision": str(revision), **kv}}


def test_a_transaction_of_guards_alone_is_made_a_read_that_the_members_agree_on() -> None:
    request = json_codec.commit(Txn((Absent("/a"),)))

    # etcd answers from the member at hand if all operations are serializable, which none are.
    assert request["success"]
    assert request["failure"]
    for op in request["success"] + request["failure"]:
        assert "serializable" not in op["request_range"]
        # The read returns only a count: a read of values could crash an etcd before 3.5.5 (see json_codec.read).
        assert op["request_range"]["count_only"]


def test_a_watch_begins_at_the_last_revision_known_and_leaves_that_one_out() -> None:
    request = json_codec.watch("/a", 7)
    received = json_codec.changes({"events": [event(7, value=""), event(8), event(8, value="eA=="), event(9)]}, 7)

    assert request["create_request"]["start_revision"] == "7"
    assert [changes.revision for changes in received] == [8, 9]


def test_a_value_that_is_no_text_is_kept_as_it_is() -> None:
    view = json_codec.view({"header": {"revision": "3"}, "kvs": [event(2, value="/w==")["kv"]]})

    assert view.entries["/a"].value.encode("utf-8", "surrogateescape") == b"\xff"


def test_a_range_ends_behind_its_last_key() -> None:
    assert json_codec.range_end("/a/") == b"/a0"
    assert json_codec.range_end("é") > "é\U0010ffff".encode()
    assert json_codec.range_end("") == b"\0"


HEAD = Endpoint("127.0.0.1", 2379)
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES)
OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EPERM)


@contextmanager
def no_more_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def connected() -> ClientConnection:
    return ClientConnection(HEAD, Deadline(DEADLINE_S))


@pytest.mark.parametrize("number", [*SILENT, *OWN, errno.ECONNREFUSED, errno.ECONNRESET])
def test_only_silence_is_silence(number: int) -> None:
    error = connection_error(OSError(number, os.strerror(number)), HEAD, "1 s", "")

    assert isinstance(error, Unavailable)
    assert error.is_silent == (number in SILENT)
    assert isinstance(error, OwnLimit) == (number in OWN)


def test_a_process_that_may_open_no_more_files_has_a_sentence_of_its_own() -> None:
    with no_more_files(), pytest.raises(OwnLimit, match=r"^elaunch may open no more files \(ulimit -n is 3\)"):
        connected()
