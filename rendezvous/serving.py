"""The store served to the other nodes, where the user has no etcd: the engine behind a part of etcd's JSON gateway.

One thread and a selector, no asyncio: its TLS keeps 256 KiB for every connection, and each agent has two.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import selectors
import socket
import ssl
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from elaunch.rendezvous.connection import Closed, Connection
from elaunch.rendezvous.engine import Engine
from elaunch.rendezvous.httpserver import BadRequest, HttpRequest, RequestReader, chunk, stream_head, whole
from elaunch.rendezvous.mvcc import Refused
from elaunch.rendezvous.routes import INTERNAL, UNAUTHENTICATED, Reply, Routes, WatchRequest, error_reply
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.watchers import Keys, Watcher, Watchers

CONNECTIONS_MAX = 16_384
BACKLOG = 4096
# Above etcd's own 1.5 MiB, as base64 in JSON; who has not shown the secret may send a token's worth.
REQUEST_BYTES_MAX = 4 << 20
_STRANGERS_BYTES_MAX = 16 << 10
# What waits to be sent on one connection; a watch that has as much waiting is told no more until some of it went.
OUTGOING_BYTES_MAX = 1 << 20
# Agents write every second; only watches are silent for longer.
IDLE_S = 60.0
# Long enough for a slow handshake through a full accept queue.
FIRST_REQUEST_S = 20.0
# For a client to read why its request was refused, when it still sends.
LINGER_S = 3.0
# Leases do not run while this process does not, as when its machine was suspended: nobody could renew them.
STALL_S = 1.5
_TICK_S = 1.0
_ACCEPTED_AT_ONCE = 64


class Server:
    """Serves one engine on `listeners`, bound already, until it is stopped. Without a secret, to anybody."""

    def __init__(self, listeners: Sequence[socket.socket], secret: Secret | None) -> None:
        self.engine = Engine()
        self._routes = Routes(self.engine, secrets.randbits(63), secrets.randbits(63))
        self._watchers = Watchers(self.engine, self._routes)
        self.engine.listen(self._watchers.told)
        self._tls: ssl.SSLContext | None = secret.server_context() if secret else None
        self._authorization = f"Bearer {secret.bearer}".encode() if secret else None
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._clients: dict[_Client, None] = {}
        self._dirty: dict[_Client, None] = {}
        self._waker, self._woken = socket.socketpair()
        self._stopping = False
        # From here on nobody who connects is turned away.
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)

    def run(self) -> None:
        """Serve until `stop`. Closes the listeners and all connections at the end."""
        self._accept_again()
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        try:
            self._loop()
        finally:
            for client in list(self._clients):
                self._close(client)
            self._selector.close()
            for each in (*self._listeners, self._waker, self._woken):
                each.close()

    def stop(self) -> None:
        """End `run`; from any thread, or from a signal handler."""
        self._stopping = True
        with suppress(OSError):
            self._waker.send(b"\0")

    def stop_at_end_of(self, fd: int) -> None:
        """End `run` when nobody holds the other end of `fd` (a pipe or socket) any more."""

        def readable() -> None:
            if not _read_some(fd):
                self._stopping = True

        self._selector.register(fd, selectors.EVENT_READ, readable)

    def _loop(self) -> None:
        last_s = swept_s = time.monotonic()
        running_s = 0.0
        while not self._stopping:
            timeout_s = max(min(_TICK_S, self.engine.idle_until_s - running_s), 0.0)
            ready = self._selector.select(timeout_s)
            now_s = time.monotonic()
            running_s += min(now_s - last_s, STALL_S)
            last_s = now_s
            self.engine.tell_time(running_s)
            for key, _ in ready:
                key.data()
            # After what has arrived: a renewal may have waited while this process did not run.
            self.engine.end_leases()
            self._flush()
            if now_s - swept_s >= _TICK_S:
                swept_s = now_s
                self._sweep(now_s)

    def _wake_up(self) -> None:
        self._woken.recv(64)

    def _accept_again(self) -> None:
        for listener in self._listeners:
            if listener not in self._selector.get_map():
                self._selector.register(listener, selectors.EVENT_READ, lambda it=listener: self._accept(it))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:
                # No descriptors left: those who wait are accepted when some connection has ended.
                self._selector.unregister(listener)
                return
            if len(self._clients) >= CONNECTIONS_MAX:
                accepted.close()
                continue
            try:
                connection = Connection(accepted, self._tls)
            except (OSError, ValueError):
                accepted.close()
                continue
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        client = _Client(connection, RequestReader(self._bytes_max), self._dirty)
        client.deadline_s = time.monotonic() + FIRST_REQUEST_S
        self._clients[client] = None
        self._selector.register(connection.socket, client.registered, partial(self._serve, client))

    def _serve(self, client: _Client) -> None:
        """Something has arrived from a client, or there is room to send it something."""
        try:
            data = client.connection.read() if client.has_room() else b""
            if data and client.watcher is None and not client.lingers:
                client.deadline_s = time.monotonic() + IDLE_S
                client.reader.feed(data)
            self._answer(client)
            self._write(client)
        except Closed:
            self._close(client)

    def _answer(self, client: _Client) -> None:
        try:
            while not (client.watcher or client.closes or client.lingers) and client.has_room():
                request = client.reader.next()
                if request is None:
                    return
                self._do(client, request)
        except BadRequest as bad:
            client.lingers = True
            client.deadline_s = time.monotonic() + LINGER_S
            client.put(whole(bad.status, f"{bad}\n".encode(), closes=True))

    def _do(self, client: _Client, request: HttpRequest) -> None:
        client.closes = request.closes
        if not self._is_authorized(request.headers):
            reply = error_reply(Refused(UNAUTHENTICATED, "etcdserver: invalid auth token"))
        else:
            answer = self._routed(request)
            if isinstance(answer, WatchRequest):
                client.closes = False
                client.put(stream_head() + chunk(self._routes.created()))
                client.watcher = self._watchers.add(Keys(answer.key, answer.end), answer.start_revision, client)
                return
            reply = answer
        client.put(whole(reply.status, reply.body, request.closes))

    def _routed(self, request: HttpRequest) -> Reply | WatchRequest:
        try:
            return self._routes.answer(request.method, request.path, request.body)
        except Exception:
            # A fault of ours: one request fails, the others' store goes on.
            traceback.print_exc()
            return error_reply(Refused(INTERNAL, "the store failed; its own output says why"))

    def _bytes_max(self, headers: Mapping[str, str]) -> int:
        return REQUEST_BYTES_MAX if self._is_authorized(headers) else _STRANGERS_BYTES_MAX

    def _is_authorized(self, headers: Mapping[str, str]) -> bool:
        if self._authorization is None:
            return True
        shown = headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(shown, self._authorization)

    def _flush(self) -> None:
        while self._dirty:
            client = next(iter(self._dirty))
            try:
                self._write(client)
            except Closed:
                self._close(client)

    def _write(self, client: _Client) -> None:
        self._dirty.pop(client, None)
        client.connection.write()
        while client.watcher and client.watcher.behind and client.has_room():
            self._watchers.catch_up(client.watcher)
            client.connection.write()
        if client.closes and not client.connection.outgoing:
            raise Closed
        if client.events != client.registered:
            client.registered = client.events
            self._selector.modify(client.connection.socket, client.events, partial(self._serve, client))

    def _sweep(self, now_s: float) -> None:
        """Close who has been silent for too long, and accept again where there was no room."""
        for client in [client for client in self._clients if client.watcher is None and client.deadline_s < now_s]:
            self._close(client)
        self._accept_again()

    def _close(self, client: _Client) -> None:
        if client in self._clients:
            del self._clients[client]
            self._dirty.pop(client, None)
            if client.watcher:
                self._watchers.remove(client.watcher)
            self._selector.unregister(client.connection.socket)
            client.connection.close()


class _Client:
    """One connection: its requests are answered in order, until one of them is a watch."""

    def __init__(self, connection: Connection, reader: RequestReader, dirty: dict[_Client, None]) -> None:
        self.connection = connection
        self.reader = reader
        self.deadline_s = math.inf
        self.watcher: Watcher | None = None
        # Close when all has been sent; or take and drop what it sends until it closes, for closing at once would reset
        # the connection, and the answer might never be read.
        self.closes = False
        self.lingers = False
        self.registered = self.events
        self._dirty = dirty

    @property
    def events(self) -> int:
        """What to wait for; one that does not take its answers is not asked for more requests."""
        events = self.connection.events
        return events if self.has_room() else events & ~selectors.EVENT_READ

    def has_room(self) -> bool:
        return len(self.connection.outgoing) < OUTGOING_BYTES_MAX

    def send(self, line: bytes) -> None:
        """A line of its watch."""
        self.put(chunk(line))

    def put(self, data: bytes) -> None:
        self.connection.outgoing += data
        self._dirty[self] = None


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b"\0"
