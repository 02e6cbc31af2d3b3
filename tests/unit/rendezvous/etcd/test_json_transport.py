"""What an HTTP server that is no etcd is told to be."""

from __future__ import annotations

from contextlib import closing

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd.discovery import FoundStore
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import GatewayOff, JsonTransport
from elaunch.rendezvous.store import Denied, Rejected, StoreError, Unavailable
from tests.relay import web_server

NO_ETCD = r"^what listens at .* is no etcd: it answers /version with HTTP status "


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
