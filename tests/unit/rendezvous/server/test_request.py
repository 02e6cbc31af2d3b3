"""rendezvous.server.connection: requests however they arrive, and what is none."""

from __future__ import annotations

import http.client
import io
from collections.abc import Mapping
from typing import Any

import pytest

from elaunch.rendezvous.server.connection import (
    HEAD_BYTES_MAX,
    STREAM_HEAD,
    BadRequest,
    HttpRequest,
    RequestReader,
    chunk,
    http_response,
)

BODY_BYTES_MAX = 1000
POST = b"POST /v3/kv/put?x=1 HTTP/1.1\r\nHost: here\r\nContent-Length: 7\r\nAuthorization: Bearer x\r\n\r\n{'a':1}"


def reader() -> RequestReader:
    def admit(headers: Mapping[str, str], body_bytes: int) -> None:
        if body_bytes > BODY_BYTES_MAX:
            raise BadRequest(413, "too large")

    return RequestReader(admit)


def read(data: bytes) -> HttpRequest | None:
    it = reader()
    it.feed(data)
    return it.next()


def test_a_request_may_arrive_byte_by_byte() -> None:
    it = reader()
    seen = []

    for byte in POST:
        seen.append(it.next())
        it.feed(bytes([byte]))

    assert set(seen) == {None}
    assert it.next() == read(POST)


def test_requests_may_arrive_together() -> None:
    it = reader()
    it.feed(POST * 3 + POST[:-1])

    found = [it.next() for _ in range(4)]

    assert found == [read(POST)] * 3 + [None]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1), 413),
        (b"POST / HTTP/1.1\r\nContent-Length: %s\r\n\r\n" % (b"9" * 4000), 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as refusal:
        read(data)

    assert refusal.value.status == status


def parsed(data: bytes) -> Any:
    """What a client of the standard library makes of an answer."""

    class Socket:
        def makefile(self, mode: str) -> io.BufferedReader:
            return io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]

    response = http.client.HTTPResponse(Socket())  # type: ignore[arg-type]
    response.begin()
    return response


@pytest.mark.parametrize(("body", "kind"), [(b'{"a":1}', "application/json"), (b"No\n", "text/plain; charset=utf-8")])
def test_a_response_is_read_by_a_client(body: bytes, kind: str) -> None:
    response = parsed(http_response(404, body))

    assert (response.status, response.reason, response.read()) == (404, "Not Found", body)
    assert response.headers["Content-Type"] == kind
    assert not response.will_close


def test_a_stream_is_read_by_a_client_line_by_line() -> None:
    response = parsed(STREAM_HEAD + chunk(b"one\n") + chunk(b"two\nthree\n") + b"0\r\n\r\n")

    assert [line.decode() for line in response] == ["one\n", "two\n", "three\n"]
