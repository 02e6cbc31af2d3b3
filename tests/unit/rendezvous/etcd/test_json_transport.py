"""What an HTTP server that is no etcd is told to be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.json_transport import JsonTransport
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import GatewayOff
from elaunch.rendezvous.store import Denied, Rejected, StoreError, TooLarge, Unavailable


@contextmanager
def web_server(status: int, version: bytes, *, posts: bool = False) -> Iterator[Endpoint]:
    """Answers GET with `version`, and knows no other request; or answers all so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(status, version)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*((status, version) if posts else (404, b"404 page not found")))

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Endpoint("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            thread.join()


def ask(endpoint: Endpoint) -> None:
    with closing(JsonTransport()) as transport:
        transport.version(endpoint, "", 10)


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
def test_a_web_server_is_said_to_be_no_etcd(status: int, version: bytes) -> None:
    with web_server(status, version) as endpoint, pytest.raises(Denied, match=r"^what listens at .* no etcd") as denied:
        ask(endpoint)

    assert not isinstance(denied.value, GatewayOff)
    assert "gateway" not in str(denied.value)


def test_an_etcd_without_its_gateway_is_told_how_to_start_it() -> None:
    version = b'{"etcdserver": "3.5.1", "etcdcluster": "3.5.0"}'

    with web_server(200, version) as endpoint, pytest.raises(GatewayOff, match=f"gateway of {endpoint} is off"):
        ask(endpoint)


def test_a_proxy_in_trouble_may_still_stand_before_an_etcd() -> None:
    with web_server(503, b"no backend") as endpoint, pytest.raises(Rejected, match="503"):
        ask(endpoint)


BY_STATUS = [
    *((401, Denied), (403, Denied), (404, GatewayOff)),
    *((413, TooLarge), (429, Unavailable), (502, Rejected)),
]


@pytest.mark.parametrize(("status", "error"), BY_STATUS)
@pytest.mark.parametrize("body", [b"<html>no</html>", b'{"message": "no"}', b'{"error": "no", "code": 499}'])
def test_what_a_proxy_answers_is_judged_by_its_status_in_html_and_in_json(
    status: int, error: type[StoreError], body: bytes
) -> None:
    with (
        web_server(status, body, posts=True) as endpoint,
        closing(EtcdStore([endpoint])) as store,
        pytest.raises(StoreError) as told,
    ):
        store.read("/elaunch/")

    assert type(told.value) is error
