"""A proxy between clients and one etcd. It passes requests on, and answers some of them itself, as a test tells it.

    with Etcd("3.5") as etcd, Refusing(etcd) as proxy:
        store = client([proxy.endpoint])
        proxy.refuse(Rpc.TXN, PERMISSION_DENIED)

It speaks HTTP/1.1 with kept connections, as etcd's JSON gateway does. Errors are as etcd 3.5 sends them: one
JSON object with gRPC's code.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import BinaryIO

from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.relay import Listener, copy

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


class Refusing(Listener):
    """The proxy, on a port of loopback; use it as a context manager. `struck` are the answers that it gave itself."""

    def __init__(self, etcd: Etcd) -> None:
        self._target = etcd.addresses[0]
        self._rules: dict[Rpc, Answer] = {}
        self._hung: list[socket.socket] = []
        self.struck: list[tuple[Rpc, Answer]] = []
        super().__init__(self._pass_on)

    def refuse(self, rpc: Rpc, answer: Answer) -> None:
        """From now on give this answer to requests of this kind, until `heal`."""
        self._rules[rpc] = answer

    def heal(self) -> None:
        """Refuse nothing any more, and end the connections whose requests hang."""
        self._rules.clear()
        hung, self._hung = self._hung, []
        for each in hung:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, client: socket.socket) -> None:
        # TLS is not spoken here.
        if not client.recv(1, socket.MSG_PEEK).isalpha():
            return
        with (
            client.makefile("rb") as requests,
            socket.create_connection((self._target.host, self._target.port), 60) as server,
        ):
            server.settimeout(None)
            threading.Thread(target=copy, args=(server, client), daemon=True).start()
            while request := _next_request(requests):
                rpc = _RPCS.get(request.split(b" ", 2)[1].decode())
                answer = self._rules.get(rpc) if rpc else None
                if not (rpc and answer):
                    server.sendall(request)
                    continue
                self.struck.append((rpc, answer))
                if answer is HANG:
                    self._hung.append(client)
                    requests.read()
                    return
                client.sendall(answer.response)


def _next_request(stream: BinaryIO) -> bytes:
    """The next request, whose body has a known length; empty at the end."""
    head, length = b"", 0
    while (line := stream.readline()).strip():
        head += line
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return head + line + stream.read(length)
