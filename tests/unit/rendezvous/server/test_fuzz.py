"""Whatever arrives at the served store, or at a client, leads to an answer or a refusal, never to a fault."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from elaunch.rendezvous.engine import Engine
from elaunch.rendezvous.server.connection import BadRequest, RequestReader
from elaunch.rendezvous.server.routes import Routes

TEXTS = [
    *("YQ==", "", "AA==", "/w==", "YQ", "Yg==", "é", "\ud800", "-1", "9" * 30, "CREATE", "MOD", "EQUAL", " 5 ", "1_0"),
]
NUMBERS = [0, 1, -1, 2**63, 2**64 - 1, -(2**63), 10**25, 1.5, 1e300, float("nan"), float("inf"), True, False, None]
FIELDS = [
    *("key", "value", "range_end", "lease", "ID", "TTL", "compare", "success", "failure", "target", "result"),
    *("create_revision", "mod_revision", "request_put", "request_range", "request_delete_range"),
    *("create_request", "start_revision"),
]
PIECES = (
    *(b"GET ", b"POST ", b"/v3/kv/put ", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.1 200 OK", b"HTTP/1.1 100 ", b"\r\n"),
    *(b"\r\n\r\n", b"Content-Length: ", b"5", b"9" * 20, b"-1", b": ", b"Connection: close", b"\xb2", b"\0", b" "),
    *(b"Transfer-Encoding: chunked", b"x" * 3000, b"a\r\n", b"0\r\n", b"f" * 30 + b"\r\n"),
)


def value(rng: random.Random, depth: int = 0) -> Any:
    if depth < 5 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(FIELDS): value(rng, depth + 1) for _ in range(rng.randrange(6))}
    return rng.choice(TEXTS if rng.random() < 0.5 else NUMBERS)


@pytest.mark.parametrize("seed", range(4))
def test_any_json_gets_a_response(seed: int) -> None:
    rng = random.Random(seed)
    routes = Routes(Engine(), 1, 2)
    paths = [*routes._handlers]
    statuses = set()

    for _ in range(2000):
        request = {rng.choice(FIELDS): value(rng, 1) for _ in range(rng.randrange(7))}
        body = bytes(rng.randrange(256) if rng.random() < 0.005 else byte for byte in json.dumps(request).encode())
        statuses.add(getattr(routes.handle("POST", rng.choice(paths), body), "status", None))

    # And None, a watch.
    assert {200, 400} <= statuses <= {None, 200, 400, 404}


def requests(data: bytes) -> None:
    def admit(headers: Mapping[str, str], body_bytes: int) -> None:
        if body_bytes > 1000:
            raise BadRequest(413, "too large")

    reader = RequestReader(admit)
    with suppress(BadRequest):
        for place in range(0, len(data), 7):
            reader.feed(data[place : place + 7])
            while reader.next():
                pass


@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_are_http_or_refused(seed: int) -> None:
    rng = random.Random(seed)

    for _ in range(2000):
        requests(b"".join(rng.choice(PIECES) for _ in range(rng.randrange(12))))
