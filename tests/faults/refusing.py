"""A proxy between clients and one etcd. It passes requests on, and answers some of them itself, as a test tells it.

    with Etcd("3.5") as etcd, Refusing(etcd) as proxy:
        store = client([proxy.endpoint])
        proxy.refuse(Rpc.TXN, PERMISSION_DENIED)

It speaks HTTP/1.1 with kept connections, as etcd's JSON gateway does. Errors are as etcd 3.5 sends them: one
JSON object with gRPC's code.
"""

from __future__ import annotations

import json
import re
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.relay import Listener

_RPCS = {f"/v3/{rpc.value}": rpc for rpc in Rpc}
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True)
class Answer:
    """An answer in place of etcd's. Without a `status` none comes."""

    status: int
    body: str
    content_type: str = "application/json"

    @property
    def response(self) -> bytes:
        head = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\nContent-Type: {self.content_type}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n{self.body}".encode()


def _error(status: int, code: int, text: str) -> Answer:
    return Answer(status, json.dumps({"error": text, "code": code, "message": text}))


NO_LEADER = _error(503, 14, "etcdserver: no leader")
CORRUPT = _error(500, 15, "etcdserver: corrupt cluster")
PERMISSION_DENIED = _error(403, 7, "etcdserver: permission denied")
BAD_GATEWAY = Answer(502, "<html><head><title>502 Bad Gateway</title></head></html>", "text/html")
HANG = Answer(0, "")


@dataclass(frozen=True)
class Request:
    """One request. `rpc` is None for a request that is no RPC (GET /version)."""

    rpc: Rpc | None
    raw: bytes


class Refusing:
    """The proxy, on a port of loopback; use it as a context manager. `struck` are the answers that it gave itself."""

    def __init__(self, etcd: Etcd) -> None:
        self._target = etcd.addresses[0]
        self._rules: dict[Rpc, Answer] = {}
        self._hung: list[socket.socket] = []
        self.struck: list[tuple[Rpc, Answer]] = []
        self._listener = Listener(self._serve)

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self._listener.__exit__()

    @property
    def endpoint(self) -> Endpoint:
        return self._listener.endpoint

    def refuse(self, rpc: Rpc, answer: Answer) -> None:
        """From now on give this answer to requests of this kind, until `heal`."""
        self._rules[rpc] = answer

    def heal(self) -> None:
        """Refuse nothing any more, and let hanging requests go on."""
        self._rules.clear()
        hung, self._hung = self._hung, []
        for each in hung:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with socket.create_connection((self._target.host, self._target.port), 60) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for request in _requests(client):
                answer = self._rules.get(request.rpc) if request.rpc else None
                if request.rpc and answer:
                    self.struck.append((request.rpc, answer))
                    if answer is not HANG:
                        client.sendall(answer.response)
                        continue
                    self._hung.append(client)
                    while client.recv(_RECEIVE_BYTES):
                        pass
                    return
                server.sendall(request.raw)
                if request.rpc is Rpc.WATCH:
                    _relay(client, server)
                    return
                client.sendall(_whole_answer(server))


def _is_whole(raw: bytes) -> bool:
    """Whether this is a whole answer of etcd."""
    head, end, body = raw.partition(b"\r\n\r\n")
    if length := re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE):
        return bool(end) and len(body) >= int(length[1])
    # The last chunk, and perhaps trailers.
    return bool(re.search(rb"(?:\A|\r\n)0\r\n(?:[^\r\n]+\r\n)*\r\n\Z", body))


def _whole_answer(server: socket.socket) -> bytes:
    raw = b""
    while not _is_whole(raw):
        data = server.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("etcd has hung up")
        raw += data
    return raw


def _requests(client: socket.socket) -> Iterator[Request]:
    """The client's requests, one by one, as HTTP/1.1 with a body of known length."""
    buffer = b""
    while True:
        while b"\r\n\r\n" not in buffer:
            data = client.recv(_RECEIVE_BYTES)
            # TLS is not spoken here.
            if not data or (not buffer and not data[:1].isalpha()):
                return
            buffer += data
        head, _, buffer = buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        while len(buffer) < length:
            data = client.recv(_RECEIVE_BYTES)
            if not data:
                return
            buffer += data
        body, buffer = buffer[:length], buffer[length:]
        yield Request(_RPCS.get(first.split(" ")[1]), head + b"\r\n\r\n" + body)


def _relay(client: socket.socket, upstream: socket.socket) -> None:
    """Pass data on in both directions, until one end closes."""
    while True:
        ready, _, _ = select.select([client, upstream], [], [])
        for each in ready:
            data = each.recv(_RECEIVE_BYTES)
            if not data:
                return
            (upstream if each is client else client).sendall(data)
