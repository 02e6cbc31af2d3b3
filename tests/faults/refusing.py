"""A proxy between clients and one etcd. It passes requests on, and answers some of them itself, as a test tells it.

    with Etcd() as etcd, Refusing(etcd) as proxy:
        store = client([proxy.endpoint])
        proxy.refuse(Rpc.TXN, SPACE_EXCEEDED, prefix="/elaunch/", times=3)
        …
        proxy.wait_until_struck(3)

It speaks HTTP/1.1 with kept connections, as etcd's JSON gateway does. What may be answered is in answers.py.
"""

from __future__ import annotations

import json
import random
import re
import select
import socket
import struct
import threading
import time
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.faults.answers import LAST_CHUNK, NO_LEADER, Answer, Fault, chunk, fits
from tests.harness import wait_for
from tests.relay import Listener

_RPCS = {f"/v3/{rpc.value}": rpc for rpc in Rpc}
# The first bytes of an HTTP/2 connection: gRPC. The proxy refuses none of its requests.
HTTP2 = "HTTP/2"
_DRIP_S = 0.05
_LINGER_NOT = struct.pack("ii", 1, 0)
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True)
class Request:
    """One request. `rpc` is None for a request that is no RPC (GET /version); `keys` are all keys that it names."""

    rpc: Rpc | None
    path: str
    keys: tuple[str, ...]
    body: bytes
    raw: bytes
    at_s: float


@dataclass(frozen=True)
class Struck:
    """A request that was not answered by etcd alone."""

    at_s: float
    request: Request
    answer: Answer

    def __str__(self) -> str:
        keys = ", ".join(self.request.keys[:3])
        return f"{self.at_s:.2f} {self.request.path} {keys}: {self.answer}"


@dataclass
class Rule:
    """A rule that gives some requests an answer. Call `end`, or let the rule end by itself."""

    rpcs: Collection[Rpc | None] | None
    answers: Mapping[Answer, float]
    prefix: str
    rate: float
    left: int | None
    until: threading.Event | None
    end_s: float
    random: random.Random

    def end(self) -> None:
        self.left = 0

    def draw(self, request: Request) -> Answer | None:
        """The answer; None if this rule does not fit the request. Call it under the proxy's lock."""
        is_over = self.left == 0 or time.monotonic() > self.end_s or (self.until is not None and self.until.is_set())
        if is_over or (self.rpcs is not None and request.rpc not in self.rpcs):
            return None
        if self.prefix and not any(key.startswith(self.prefix) for key in request.keys):
            return None
        fitting = {answer: weight for answer, weight in self.answers.items() if fits(answer, request.rpc)}
        if not fitting or self.random.random() >= self.rate:
            return None
        self.left = None if self.left is None else self.left - 1
        return self.random.choices(list(fitting), list(fitting.values()))[0]


class Refusing:
    """The proxy, on a port of loopback; use it as a context manager. The newest rule that fits a request is taken.

    `struck` are the requests that it answered instead of etcd, `seen` all requests. Threads ask in any order, so the
    same seed gives the same random numbers, but not the same history.
    """

    def __init__(self, etcd: Etcd, member: int = 0) -> None:
        self._target = etcd.addresses[member]
        self._version = etcd.version
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._hung: list[socket.socket] = []
        self._streams: list[socket.socket] = []
        self.struck: list[Struck] = []
        self.waiting = Waiting()
        self._listener = Listener(self._serve)

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self._listener.__exit__()

    @property
    def endpoint(self) -> Endpoint:
        return self._listener.endpoint

    def refuse(
        self,
        rpcs: Rpc | Collection[Rpc | None] | None,
        answer: Answer,
        *,
        prefix: str = "",
        times: int | None = None,
        until: threading.Event | None = None,
        for_s: float = float("inf"),
        rate: float = 1.0,
        seed: int = 0,
    ) -> Rule:
        """From now on give this answer to requests of these kinds (None: all) that name a key under `prefix`.

        The other arguments limit the rule: a number of times, an event that ends it, a duration, a share of requests.
        """
        return self._add(rpcs, {answer: 1.0}, prefix, times, until, for_s, rate, seed)

    def chaos(
        self,
        seed: int,
        rate: float,
        table: Collection[Answer] | Mapping[Answer, float],
        rpcs: Rpc | Collection[Rpc | None] | None = None,
        for_s: float = float("inf"),
    ) -> Rule:
        """From now on answer a random share of all requests. The table's values are weights."""
        weights = dict(table) if isinstance(table, Mapping) else dict.fromkeys(table, 1.0)
        return self._add(rpcs, weights, "", None, None, for_s, rate, seed)

    def heal(self) -> None:
        """End all rules, and let hanging requests go on. A watch that was made deaf stays deaf."""
        with self._lock:
            self._rules.clear()
            hung, self._hung = self._hung, []
        for each in hung:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut_streams(self) -> None:
        """End the watches that are passed on now. A request that begins another watch is treated like any request."""
        with self._lock:
            streams, self._streams = self._streams, []
        for each in streams:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def strikes(self, rpc: Rpc | None = None, answer: Answer | None = None) -> list[Struck]:
        """The faults of this kind that have struck."""
        return [s for s in list(self.struck) if rpc in (None, s.request.rpc) and answer in (None, s.answer)]

    def wait_until_struck(self, count: int = 1, rpc: Rpc | None = None, answer: Answer | None = None) -> None:
        """Wait until that many requests have got such an answer since the start."""
        wait_for(lambda: len(self.strikes(rpc, answer)) >= count, f"{count} times {answer or 'any answer'} to {rpc}")

    def _add(
        self,
        rpcs: Rpc | Collection[Rpc | None] | None,
        answers: Mapping[Answer, float],
        prefix: str,
        times: int | None,
        until: threading.Event | None,
        for_s: float,
        rate: float,
        seed: int,
    ) -> Rule:
        kinds = (rpcs,) if isinstance(rpcs, Rpc) else rpcs
        rule = Rule(kinds, answers, prefix, rate, times, until, time.monotonic() + for_s, random.Random(seed))
        with self._lock:
            self._rules.insert(0, rule)
        return rule

    def _drawn(self, request: Request) -> Answer | None:
        with self._lock:
            for rule in self._rules:
                if (answer := rule.draw(request)) is not None:
                    self.struck.append(Struck(time.monotonic(), request, answer))
                    return answer
        return None

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = _Server(self._target)
        with ExitStack() as stack:
            stack.callback(server.close)
            for request in _requests(client):
                if request.path == HTTP2:
                    _relay(client, server.ask(request))
                    return
                self.waiting.begun(request)
                answer = self._drawn(request)
                if answer is None:
                    may_go_on = self._hand_on(client, server, request)
                else:
                    may_go_on = self._strike(client, server, request, answer)
                if not may_go_on:
                    return

    def _hand_on(self, client: socket.socket, server: _Server, request: Request) -> bool:
        """Whether another request may follow on the connection."""
        if request.rpc is Rpc.WATCH:
            self.waiting.answered(request)
            with self._lock:
                self._streams.append(client)
            _relay(client, server.ask(request))
            return False
        answer, status = server.answer(request)
        if status == 200:
            self.waiting.answered(request)
        client.sendall(answer)
        return True

    def _strike(self, client: socket.socket, server: _Server, request: Request, answer: Answer) -> bool:
        """Whether another request may follow on the connection."""
        if not isinstance(answer, Fault):
            client.sendall(answer.response(request.rpc, self._version))
            if request.rpc is Rpc.WATCH:
                self._hang(client)
            return True
        match answer:
            case Fault.HANG:
                self._hang(client)
            case Fault.RESET:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            case Fault.GARBAGE:
                client.sendall(b"\x00\xff\x15garbage\r\n" * 8)
            case Fault.STREAM_ENDS | Fault.STREAM_ERROR | Fault.STREAM_DEAF:
                self._spoil_stream(client, server.ask(request), answer)
            case Fault.LOST:
                server.answer(request)
            case Fault.UNANSWERED:
                server.answer(request)
                self._hang(client)
            case Fault.CUT:
                whole, _ = server.answer(request)
                client.sendall(whole[: len(whole) - 20])
            case Fault.DRIP:
                whole, _ = server.answer(request)
                _drip(client, whole)
        return False

    def _spoil_stream(self, client: socket.socket, upstream: socket.socket, fault: Fault) -> None:
        client.sendall(upstream.recv(_RECEIVE_BYTES))
        if fault is Fault.STREAM_ENDS:
            client.sendall(LAST_CHUNK)
        elif fault is Fault.STREAM_ERROR:
            client.sendall(chunk(NO_LEADER.stream_error()) + LAST_CHUNK)
        else:
            _wait_for_end(client)

    def _hang(self, client: socket.socket) -> None:
        """Send nothing more until the client hangs up, or `heal` is called."""
        with self._lock:
            self._hung.append(client)
        _wait_for_end(client)


class Waiting:
    """The requests that a client repeats without a good answer; for a proxy that has one client.

    A request is identified by its kind and its body, which are the same in each try. A grant and a watch are identified
    by their keys only, since a grant's number differs in each try.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[tuple[Rpc, bytes], tuple[float, float, int]] = {}

    def begun(self, request: Request) -> None:
        if request.rpc is None:
            return
        with self._lock:
            since_s, _, tries = self._since.get(self._name(request), (request.at_s, 0.0, 0))
            self._since[self._name(request)] = since_s, request.at_s, tries + 1

    def answered(self, request: Request) -> None:
        if request.rpc is not None:
            with self._lock:
                self._since.pop(self._name(request), None)
                if request.rpc is Rpc.WATCH:
                    # The status is asked only to find out why a watch cannot begin.
                    self._since = {name: tries for name, tries in self._since.items() if name[0] is not Rpc.STATUS}

    def now(self, patience_s: float) -> dict[tuple[Rpc, bytes], float]:
        """The time of the first failed try of each request that is still being tried."""
        oldest_s = time.monotonic() - patience_s
        with self._lock:
            return {name: since_s for name, (since_s, last_s, _) in self._since.items() if last_s > oldest_s}

    def _name(self, request: Request) -> tuple[Rpc, bytes]:
        assert request.rpc is not None
        if request.rpc is Rpc.TXN and b"request_put" not in request.body and b"request_delete" not in request.body:
            # A read that asks whether anything has changed. Its body differs in each try.
            return request.rpc, b"a look"
        is_same_by_keys = request.rpc in (Rpc.GRANT, Rpc.WATCH)
        return request.rpc, " ".join(request.keys).encode() if is_same_by_keys else request.body


def _is_whole(raw: bytes) -> bool:
    """Whether this is a whole answer of etcd."""
    head, end, body = raw.partition(b"\r\n\r\n")
    if length := re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE):
        return bool(end) and len(body) >= int(length[1])
    # The last chunk, and perhaps trailers.
    return bool(re.search(rb"(?:\A|\r\n)0\r\n(?:[^\r\n]+\r\n)*\r\n\Z", body))


class _Server:
    """A connection to etcd, opened when first needed."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._socket: socket.socket | None = None

    def ask(self, request: Request) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection((self._target.host, self._target.port), 60)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(request.raw)
        return self._socket

    def answer(self, request: Request) -> tuple[bytes, int]:
        """The whole answer as it came, and its status."""
        upstream, raw = self.ask(request), b""
        while not _is_whole(raw):
            data = upstream.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("etcd has hung up")
            raw += data
        return raw, int(raw[9:12])

    def close(self) -> None:
        if self._socket:
            self._socket.close()


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
        method, _, rest = first.partition(" ")
        path = HTTP2 if method == "PRI" else rest.partition(" ")[0]
        if path == HTTP2:
            body, buffer = buffer, b""
        raw = head + b"\r\n\r\n" + body
        yield Request(_RPCS.get(path), path, tuple(_keys(_parsed(body))), body, raw, time.monotonic())


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _keys(value: Any) -> Iterator[str]:
    """All values with the name `key`, however deep they are."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name == "key" and isinstance(each, str):
                yield b64decode(each).decode(errors="replace")
            else:
                yield from _keys(each)
    elif isinstance(value, list):
        for each in value:
            yield from _keys(each)


def _relay(client: socket.socket, upstream: socket.socket) -> None:
    """Pass data on in both directions, until one end closes."""
    while True:
        ready, _, _ = select.select([client, upstream], [], [])
        for each in ready:
            data = each.recv(_RECEIVE_BYTES)
            if not data:
                return
            (upstream if each is client else client).sendall(data)


def _wait_for_end(client: socket.socket) -> None:
    while client.recv(_RECEIVE_BYTES):
        pass


def _drip(client: socket.socket, data: bytes) -> None:
    for i in range(len(data)):
        client.sendall(data[i : i + 1])
        # The client may have given up and closed the connection.
        if select.select([client], [], [], _DRIP_S)[0]:
            return
