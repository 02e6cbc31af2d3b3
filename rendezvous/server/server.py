"""The store that a job serves to its nodes, if the user has no etcd: the engine behind a part of etcd's JSON gateway.

One thread and a selector. asyncio's TLS would keep 256 KiB for every connection, and each agent has two.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from elaunch.rendezvous.engine import Engine
from elaunch.rendezvous.etcd.errors import EXHAUSTED, UNAUTHENTICATED
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.server.admission import CONNECTIONS_MAX, WAY_OUT, Unauthenticated, unauthenticated_max
from elaunch.rendezvous.server.connection import (
    STREAM_HEAD,
    BadRequest,
    Closed,
    Connection,
    HttpRequest,
    RequestReader,
    chunk,
    http_response,
)
from elaunch.rendezvous.server.routes import Routes, Watchers, WatchRequest, error_reply

BACKLOG = 4096
# etcd's gRPC accepts requests up to 2 MiB; this is that size as base64 in JSON.
REQUEST_BYTES_MAX = 3 << 20
# Agents write every second; only watches are silent for longer.
IDLE_S = 60.0
# A client that reads nothing for this long is gone, or will reconnect.
STALLED_S = 20.0
# A client whose request was refused has this long to read the reason.
LINGER_S = 3.0
# While this process does not run (its machine is suspended), no lease can be renewed, so no lease's time runs.
STALL_S = 1.5
# Between two log lines about the same thing.
QUIET_S = 60.0
_TICK_S = 1.0
# Limits of one turn of the loop: many clients may not delay the others. More are accepted than handshaken: in the
# kernel's accept queue one address can be before all others.
_ACCEPTED_AT_ONCE = 256
_HANDSHAKES_S = 0.02
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Serves one engine on `listener`, which is bound already.

    `slots` is how many connections may be open. A connection is unauthenticated until a complete request on it has
    carried the secret. `is_shared`: no node of a job serves it.
    """

    def __init__(
        self, listener: socket.socket, secret: Secret, slots: int = CONNECTIONS_MAX, *, is_shared: bool = False
    ) -> None:
        self.engine = Engine()
        self._routes = Routes(self.engine, secrets.randbits(63), secrets.randbits(63), is_shared=is_shared)
        self._watchers = Watchers(self.engine, self._routes)
        self.engine.listener = self._watchers.notify
        self._tls = secret.server_context()
        self._authorization = f"Bearer {secret.bearer}".encode()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._slots = slots
        self._clients: dict[Connection, None] = {}
        # Those whose first data waits to be read are not in the selector.
        self._unauthenticated: Unauthenticated[Connection] = Unauthenticated()
        self._dirty: dict[Connection, None] = {}
        self._quiet_until_s: dict[str, float] = {}
        self._now_s = time.monotonic()
        self._stopping = False
        # From here on every connection is accepted.
        listener.setblocking(False)
        listener.listen(BACKLOG)

    def run(self) -> None:
        """Serve until the fd of `stop_at_end_of` is closed. Closes the listener and all connections at the end."""
        self._accept_again()
        try:
            self._loop()
        finally:
            for client in list(self._clients):
                self._close(client)
            self._selector.close()
            self._listener.close()

    def stop_at_end_of(self, fd: int) -> None:
        """End `run` when the other end of `fd` (a pipe or socket) is closed."""

        def readable() -> None:
            with suppress(BlockingIOError):
                self._stopping = not os.read(fd, 4096)

        self._selector.register(fd, selectors.EVENT_READ, readable)

    def _loop(self) -> None:
        last_s = swept_s = self._now_s
        running_s = 0.0
        while not self._stopping:
            timeout_s = max(min(_TICK_S, self.engine.idle_until_s - running_s), 0.0)
            ready = self._selector.select(0.0 if self._unauthenticated.has_arrivals else timeout_s)
            now_s = self._now_s = time.monotonic()
            running_s += min(now_s - last_s, STALL_S)
            last_s = now_s
            self.engine.set_time(running_s)
            for key, _ in ready:
                key.data()
            self._handshake()
            # After the requests: a renewal may have waited while this process did not run.
            self.engine.end_leases()
            self._flush()
            if now_s - swept_s >= _TICK_S:
                self._sweep(now_s - swept_s)
                swept_s = now_s

    def _accept_again(self) -> None:
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                if error.errno in _NO_RESOURCES and not _has_pending(self._listener):
                    return
                self._log("descriptors", f"no connection can be accepted until another one ends: {error.strerror}")
                if error.errno in _NO_RESOURCES and (first := self._unauthenticated.first_to_go()):
                    self._close(first)
                    continue
                # Waiting connections are accepted at the next sweep: other connections may have ended by then.
                self._selector.unregister(self._listener)
                return
            if not self._free_slot():
                accepted.close()
                continue
            try:
                client = Connection(accepted, self._tls, RequestReader(self._admit), self._dirty)
            except (OSError, ValueError):
                accepted.close()
                continue
            self._clients[client] = None
            # A dual-stack listener shows an IPv4 address with this prefix.
            self._unauthenticated.add(client, str(peer[0]).removeprefix("::ffff:"), self._now_s)
            self._selector.register(client.socket, client.registered, partial(self._arrive, client))

    def _free_slot(self) -> bool:
        """Close unauthenticated connections if there are too many. Returns whether one more connection fits."""
        most = unauthenticated_max(self._slots, len(self._clients) - len(self._unauthenticated))
        while len(self._unauthenticated) >= most and (first := self._unauthenticated.first_to_go()):
            who = ", ".join(f"{address} has {count}" for address, count in self._unauthenticated.crowds())
            self._log(
                "unauthenticated",
                f"all {most} slots for connections that have not shown the job's token are taken ({who}); each new one"
                f" closes the oldest one of the address that has the most; {WAY_OUT}",
            )
            self._close(first)
        if most <= 0:
            self._log(
                "slots",
                f"agents take all {self._slots} slots for connections, and further connections are refused; raise the"
                " limit of open files on this host (ulimit -n), or let fewer jobs share the store",
            )
        return most > 0

    def _arrive(self, client: Connection) -> None:
        """Queue a client whose first data has arrived. It is read when it is the turn of the client's address."""
        if client in self._clients:
            self._selector.unregister(client.socket)
            client.registered = 0
            self._unauthenticated.arrive(client, self._now_s)

    def _handshake(self) -> None:
        """Read the first data of clients that wait for it, up to the limit of one turn. At least one has its turn."""
        until_s = time.monotonic() + _HANDSHAKES_S
        while self._unauthenticated.has_arrivals:
            client = self._unauthenticated.next_arrival(self._now_s)
            try:
                client.begin()
            except Closed:
                self._close(client)
                continue
            client.registered = client.events
            self._selector.register(client.socket, client.registered, partial(self._serve, client))
            self._serve(client)
            if time.monotonic() >= until_s:
                break

    def _serve(self, client: Connection) -> None:
        """Read, respond and write. Called if data has arrived, or can be sent."""
        if client not in self._clients:
            return
        try:
            if client.has_space():
                client.read()
            while self._respond(client):
                self._write(client)
                if not client.has_space():
                    return
            self._write(client)
        except Closed:
            self._close(client)

    def _respond(self, client: Connection) -> bool:
        """Carry out the requests that have arrived. Returns whether there was no space for further responses."""
        try:
            while client.takes_requests and (request := client.reader.next()):
                self._do(client, request)
                if not client.has_space():
                    return True
        except BadRequest as bad:
            client.lingers = True
            client.deadline_s = self._now_s + LINGER_S
            client.put(http_response(bad.status, bad.body, closes=True))
        return False

    def _do(self, client: Connection, request: HttpRequest) -> None:
        """Run one request. Its client is authenticated: else `_admit` would have refused the request."""
        client.is_known = True
        client.deadline_s = self._now_s + IDLE_S
        self._unauthenticated.shown(client)
        response = self._routes.handle(request.method, request.path, request.body)
        if isinstance(response, WatchRequest):
            client.put(STREAM_HEAD + chunk(self._routes.created()))
            client.watcher = self._watchers.add(response.prefix, response.start_revision, client)
        else:
            client.put(http_response(response.status, response.body))

    def _admit(self, headers: Mapping[str, str], body_bytes: int) -> None:
        """Raises BadRequest to refuse a request by its headers, before its body is read."""
        shown = headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(shown, self._authorization):
            reply = error_reply(UNAUTHENTICATED, "etcdserver: invalid auth token")
            raise BadRequest(reply.status, reply.body)
        if body_bytes > REQUEST_BYTES_MAX:
            # etcd's own text. etcd counts the bytes as protocol buffers; this request has not been parsed.
            text = f"grpc: received message larger than max ({body_bytes} vs. {REQUEST_BYTES_MAX})"
            raise BadRequest(413, error_reply(EXHAUSTED, text).body)

    def _flush(self) -> None:
        while self._dirty:
            client = next(iter(self._dirty))
            try:
                self._write(client)
            except Closed:
                self._close(client)

    def _write(self, client: Connection) -> None:
        self._dirty.pop(client, None)
        client.write(self._now_s)
        while client.watcher and client.watcher.behind and client.has_space():
            self._watchers.catch_up(client.watcher)
            client.write(self._now_s)
        if client.events != client.registered:
            client.registered = client.events
            self._selector.modify(client.socket, client.events, partial(self._serve, client))

    def _sweep(self, interval_s: float) -> None:
        """Close clients that timed out, and accept connections again. The last sweep was `interval_s` ago."""
        now_s = self._now_s
        if sentence := self._unauthenticated.lag_report(now_s, interval_s):
            self._log("lag", sentence)
        for client in self._unauthenticated.overdue(now_s):
            self._close(client)
        for client in [client for client in self._clients if _is_over(client, now_s)]:
            self._close(client)
        self._accept_again()

    def _close(self, client: Connection) -> None:
        if client in self._clients:
            del self._clients[client]
            self._unauthenticated.discard(client)
            self._dirty.pop(client, None)
            if client.watcher:
                self._watchers.remove(client.watcher)
            if client.registered:
                self._selector.unregister(client.socket)
            client.close()

    def _log(self, about: str, sentence: str) -> None:
        """Write a line to stderr, at most one in `QUIET_S` seconds about the same thing."""
        if self._now_s < self._quiet_until_s.get(about, 0.0):
            return
        self._quiet_until_s[about] = self._now_s + QUIET_S
        # Never block on stderr: its reader may be gone.
        poll = select.poll()
        with suppress(OSError, ValueError):
            poll.register(sys.stderr, select.POLLOUT)
            if any(event & select.POLLOUT for _, event in poll.poll(0)):
                print(f"elaunch's store: {sentence}", file=sys.stderr, flush=True)


def _has_pending(listener: socket.socket) -> bool:
    """Whether a connection waits. Without a free descriptor accept() fails even if none does."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def _is_over(client: Connection, now_s: float) -> bool:
    if client.is_stalled(now_s - STALLED_S):
        return True
    waits = client.watcher or (client.outgoing and not client.lingers)
    return client.deadline_s < now_s and not waits
