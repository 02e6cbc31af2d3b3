"""Requests over gRPC, for an etcd without a JSON gateway. It uses the channel, credentials and calls of package etcd3.

The rest of that package is not used: its watcher spins while a server is unreachable and never resumes, its lock does
not work with today's tenacity, and its client knows one endpoint and one token that it never renews.

A process with an open channel must not fork without exec: the child would lack gRPC's threads.
"""

from __future__ import annotations

import importlib
import ssl
import threading
from contextlib import suppress
from typing import Any

from elaunch.rendezvous.endpoint import Access, Endpoint, Tls
from elaunch.rendezvous.etcd.grpc_messages import load
from elaunch.rendezvous.etcd.transport import EtcdError, Json, Rpc
from elaunch.rendezvous.store import Denied, StoreError, TimedOut, Unavailable

# Service, method and request of each call, in etcd's rpc.proto.
_CALLS = {
    Rpc.RANGE: ("KV", "Range", "RangeRequest"),
    Rpc.TXN: ("KV", "Txn", "TxnRequest"),
    Rpc.GRANT: ("Lease", "LeaseGrant", "LeaseGrantRequest"),
    Rpc.KEEP_ALIVE: ("Lease", "LeaseKeepAlive", "LeaseKeepAliveRequest"),
    Rpc.REVOKE: ("Lease", "LeaseRevoke", "LeaseRevokeRequest"),
    Rpc.WATCH: ("Watch", "Watch", "WatchRequest"),
    Rpc.AUTHENTICATE: ("Auth", "Authenticate", "AuthenticateRequest"),
    Rpc.STATUS: ("Maintenance", "Status", "StatusRequest"),
}
_OPTIONS = (
    # By default gRPC tries again after 1 to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A host that disappeared is noticed after 7 s. etcd treats pings faster than every 5 s as an attack.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
_CANCELLED, _DEADLINE, _UNAVAILABLE = 1, 4, 14


class GrpcTransport:
    """An `RpcTransport`. Raises Denied without the package, and for the store that elaunch serves."""

    def __init__(self, access: Access) -> None:
        if access.bearer or isinstance(access.tls, ssl.SSLContext):
            raise Denied("the store that elaunch serves knows no gRPC; leave --rdzv-conf transport=grpc out")
        self._etcd3: Any = load()
        self._grpc: Any = importlib.import_module("grpc")
        self._json: Any = importlib.import_module("google.protobuf.json_format")
        self._tls = access.tls
        self._lock = threading.Lock()
        self._clients: dict[Endpoint, Any] = {}
        self._calls: dict[tuple[Endpoint, Rpc], Any] = {}

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        return str(self.call(endpoint, Rpc.STATUS, {}, token, deadline_s).get("version", ""))

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        call, message = self._prepared(endpoint, rpc, request)
        try:
            if rpc is not Rpc.KEEP_ALIVE:
                return self._plain(call(message, timeout=deadline_s, metadata=_metadata(token)))
            stream = call(iter([message]), timeout=deadline_s, metadata=_metadata(token))
            try:
                return self._plain(next(stream))
            finally:
                stream.cancel()
        except StopIteration:
            raise Unavailable(f"{endpoint} ended the stream") from None
        except self._grpc.RpcError as error:
            raise explained(error, endpoint, deadline_s) from error

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> GrpcStream:
        call, message = self._prepared(endpoint, rpc, request)
        asked = _Asked(message)
        metadata = (*_metadata(token), ("hasleader", "true"))
        return GrpcStream(self, endpoint, call(asked, metadata=metadata), asked)

    def close(self) -> None:
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
            self._calls.clear()
        for client in clients:
            client.close()

    def next_of(self, stream: Any, endpoint: Endpoint, deadline_s: float | None) -> Json:
        """The next answer of a stream, as JSON. Raises StopIteration at its end."""
        # A timer ends the wait: gRPC only knows a deadline for a whole stream.
        timer = threading.Timer(deadline_s, stream.cancel) if deadline_s is not None else None
        if timer:
            timer.daemon = True
            timer.start()
        try:
            return self._plain(next(stream))
        except self._grpc.RpcError as error:
            if timer and timer.finished.is_set() and error.code().value[0] == _CANCELLED:
                raise TimedOut(f"no answer from {endpoint} within {deadline_s:.3g} s") from error
            raise explained(error, endpoint, deadline_s or 0) from error
        finally:
            if timer:
                timer.cancel()

    def _plain(self, message: Any) -> Json:
        found: Json = self._json.MessageToDict(message, preserving_proto_field_name=True)
        return found

    def _prepared(self, endpoint: Endpoint, rpc: Rpc, request: Json) -> tuple[Any, Any]:
        service, method, kind = _CALLS[rpc]
        messages = self._etcd3.etcdrpc
        with self._lock:
            if endpoint not in self._clients:
                self._clients[endpoint] = self._connected(endpoint)
            if (endpoint, rpc) not in self._calls:
                stub = getattr(messages, f"{service}Stub")(self._clients[endpoint].channel)
                self._calls[endpoint, rpc] = getattr(stub, method)
            call = self._calls[endpoint, rpc]
        return call, self._json.ParseDict(request, getattr(messages, kind)())

    def _connected(self, endpoint: Endpoint) -> Any:
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        files: dict[str, str | None] = {}
        if isinstance(self._tls, Tls):
            # Without a CA the package's client would use no TLS.
            ca = self._tls.ca or ssl.get_default_verify_paths().cafile
            if not ca:
                raise Denied(f"{endpoint}: transport=grpc needs the file of the CA; give ca_cert in --rdzv-conf")
            files = {"ca_cert": ca, "cert_cert": self._tls.certificate, "cert_key": self._tls.key}
        try:
            return self._etcd3.Etcd3Client(host, endpoint.port, grpc_options=_OPTIONS, **files)
        except (OSError, ValueError) as error:
            raise Denied(f"the certificate files cannot be used: {error}") from error


class _Asked:
    """The request side of a stream: one request, and then nothing until the stream ends."""

    def __init__(self, message: Any) -> None:
        self._messages = [message]
        self._over = threading.Event()

    def __iter__(self) -> _Asked:
        return self

    def __next__(self) -> Any:
        if self._messages:
            return self._messages.pop()
        self._over.wait()
        raise StopIteration

    def end(self) -> None:
        self._over.set()


class GrpcStream:
    """The answers of one call, one by one."""

    def __init__(self, transport: GrpcTransport, endpoint: Endpoint, call: Any, asked: _Asked) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._call = call
        self._asked = asked

    def next(self, deadline_s: float | None) -> Json:
        try:
            return self._transport.next_of(self._call, self._endpoint, deadline_s)
        except StopIteration:
            raise Unavailable(f"{self._endpoint} ended the stream") from None

    def hang_up(self) -> None:
        self._asked.end()
        self._call.cancel()

    def close(self) -> None:
        with suppress(Exception):
            self.hang_up()


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def explained(error: Any, endpoint: Endpoint, deadline_s: float) -> StoreError | EtcdError:
    """The store's error for gRPC's: etcd's own answer, or a sentence about the connection."""
    code, text = error.code().value[0], error.details() or ""
    if text.startswith("etcdserver:") or code not in (_CANCELLED, _DEADLINE, _UNAVAILABLE):
        return EtcdError(code, text)
    if code == _DEADLINE:
        return TimedOut(f"no answer from {endpoint} within {deadline_s:.3g} s")
    if code == _CANCELLED:
        return Unavailable(f"the stream from {endpoint} was closed")
    if "andshake failed" in text and "WRONG_VERSION_NUMBER" in text:
        return Denied(f"{endpoint} does not speak TLS; use http://{endpoint}")
    if "andshake failed" in text and "certificate" in text.lower():
        return Denied(f"{endpoint}: its certificate is not trusted; is the CA the right one?")
    if "Connection refused" in text:
        return Unavailable(f"{endpoint} refuses connections: nobody listens there")
    return Unavailable(f"{endpoint} cannot be reached: {text}")
