"""Requests over gRPC, for an etcd without a JSON gateway, with the messages of the package etcd3.

Only the package's descriptors of messages are used. Its generated modules are from 2018, do not load with protobuf 4 or
later, and register names in the pool that the whole process shares; its client knows one endpoint and one token.

A process with an open channel must not fork without exec: the child would lack gRPC's threads.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from elaunch.rendezvous.endpoint import Access, Endpoint, Tls
from elaunch.rendezvous.etcd.transport import EtcdError, Json, Rpc
from elaunch.rendezvous.store import Denied, StoreError, TimedOut, Unavailable

# Service and method of each call, in etcd's rpc.proto.
_CALLS = {
    Rpc.RANGE: ("KV", "Range"),
    Rpc.TXN: ("KV", "Txn"),
    Rpc.GRANT: ("Lease", "LeaseGrant"),
    Rpc.KEEP_ALIVE: ("Lease", "LeaseKeepAlive"),
    Rpc.REVOKE: ("Lease", "LeaseRevoke"),
    Rpc.WATCH: ("Watch", "Watch"),
    Rpc.AUTHENTICATE: ("Auth", "Authenticate"),
    Rpc.STATUS: ("Maintenance", "Status"),
}
_OPTIONS = (
    # By default gRPC reconnects after 1 to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A host that disappeared is detected after 7 s. etcd treats pings less than 5 s apart as an attack.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
_CANCELLED, _DEADLINE, _UNAVAILABLE = 1, 4, 14
_ABSENT = "--rdzv-conf transport=grpc needs the package etcd3: pip install 'elaunch[etcd3]'"
_VERBOSITY = "GRPC_VERBOSITY"


@cache
def load() -> tuple[Any, Any, dict[str, Any]]:
    """The modules `grpc` and `json_format`, and the classes of etcd's messages by name. Raises Denied without them."""
    try:
        spec = importlib.util.find_spec("etcd3")
        grpc, json = _import_grpc_quietly(), importlib.import_module("google.protobuf.json_format")
    except (ImportError, ValueError):
        raise Denied(_ABSENT) from None
    if spec is None or not spec.submodule_search_locations:
        raise Denied(_ABSENT)
    package = Path(spec.submodule_search_locations[0])
    try:
        return grpc, json, _messages(package / "etcdrpc")
    except Exception as error:
        raise Denied(
            f"the package etcd3 in {package} cannot be used ({type(error).__name__}: {error}); "
            "pip install etcd3==0.12.0"
        ) from error


def _import_grpc_quietly() -> Any:
    """Import gRPC without its log of errors, which callers get anyway. It reads the variable when it is imported."""
    before = os.environ.get(_VERBOSITY)
    os.environ[_VERBOSITY] = before or "NONE"
    try:
        return importlib.import_module("grpc")
    finally:
        # Workers must not inherit the variable.
        if before is None:
            del os.environ[_VERBOSITY]


def _messages(folder: Path) -> dict[str, Any]:
    """The classes of all messages, by name, in a private pool."""
    pool_module: Any = importlib.import_module("google.protobuf.descriptor_pool")
    factory: Any = importlib.import_module("google.protobuf.message_factory")
    descriptors: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    pool = pool_module.DescriptorPool()
    found = {}
    # In dependency order.
    for name in ("kv", "auth", "rpc"):
        source = (folder / f"{name}_pb2.py").read_text()
        literal = re.search(r"serialized_pb=_b\(('(?:[^'\\]|\\.)*')\)", source)
        if not literal:
            raise ValueError("no descriptor in its generated modules")
        raw = str(ast.literal_eval(literal[1])).encode("latin-1")
        pool.AddSerializedFile(raw)
        file = descriptors.FileDescriptorProto.FromString(raw)
        for message in file.message_type:
            descriptor = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            found[message.name] = factory.GetMessageClass(descriptor)
    return found


class GrpcTransport:
    """An `RpcTransport`. Raises Denied without the package, and for the store that elaunch serves."""

    def __init__(self, access: Access) -> None:
        if access.bearer or isinstance(access.tls, ssl.SSLContext):
            raise Denied("the store that elaunch serves does not support gRPC; leave --rdzv-conf transport=grpc out")
        self._grpc, self._json, self._messages = load()
        self._tls = access.tls
        self._lock = threading.Lock()
        self._channels: dict[Endpoint, Any] = {}

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        return str(self.call(endpoint, Rpc.STATUS, {}, token, deadline_s).get("version", ""))

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        if rpc is Rpc.KEEP_ALIVE:
            with closing(self.stream(endpoint, rpc, request, token, deadline_s)) as stream:
                return stream.next(deadline_s)
        try:
            response: Json = self._method(endpoint, rpc)(request, timeout=deadline_s, metadata=_metadata(token))
        except self._grpc.RpcError as error:
            raise explained(error, endpoint, deadline_s) from error
        return response

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> GrpcStream:
        over = threading.Event()
        metadata = (*_metadata(token), ("hasleader", "true"))
        call = self._method(endpoint, rpc)(_requests(request, over), metadata=metadata)
        return GrpcStream(endpoint, call, over, self._grpc.RpcError)

    def close(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _method(self, endpoint: Endpoint, rpc: Rpc) -> Any:
        """The callable that sends a request and returns the response, or for a stream the responses, as JSON."""
        service, method = _CALLS[rpc]
        with self._lock:
            if endpoint not in self._channels:
                self._channels[endpoint] = self._connected(endpoint)
            channel = self._channels[endpoint]
        make = channel.stream_stream if rpc in (Rpc.KEEP_ALIVE, Rpc.WATCH) else channel.unary_unary
        sent, received = self._messages[f"{method}Request"], self._messages[f"{method}Response"]

        def written(request: Json) -> Any:
            return self._json.ParseDict(request, sent()).SerializeToString()

        def read(data: bytes) -> Any:
            return self._json.MessageToDict(received.FromString(data), preserving_proto_field_name=True)

        return make(f"/etcdserverpb.{service}/{method}", request_serializer=written, response_deserializer=read)

    def _connected(self, endpoint: Endpoint) -> Any:
        if not isinstance(self._tls, Tls):
            return self._grpc.insecure_channel(str(endpoint), _OPTIONS)
        ca = self._tls.ca or ssl.get_default_verify_paths().cafile
        names = (ca, self._tls.key, self._tls.certificate)
        try:
            files = [Path(name).read_bytes() if name else None for name in names]
        except OSError as error:
            raise Denied(f"the certificate files cannot be used: {error}") from error
        return self._grpc.secure_channel(str(endpoint), self._grpc.ssl_channel_credentials(*files), _OPTIONS)


def _requests(request: Json, over: threading.Event) -> Iterator[Json]:
    """The request side of a stream: one request, and then nothing until the stream ends."""
    yield request
    over.wait()


class GrpcStream:
    """The responses of one call, one by one."""

    def __init__(self, endpoint: Endpoint, call: Any, over: threading.Event, rpc_error: Any) -> None:
        self._endpoint = endpoint
        self._call = call
        self._over = over
        self._rpc_error = rpc_error

    def next(self, deadline_s: float | None) -> Json:
        # A timer ends the wait: gRPC has a deadline only for a whole stream.
        timer = threading.Timer(deadline_s or 0, self._call.cancel)
        timer.daemon = True
        if deadline_s is not None:
            timer.start()
        try:
            response: Json = next(self._call)
            return response
        except StopIteration:
            raise Unavailable(f"{self._endpoint} ended the stream") from None
        except self._rpc_error as error:
            if timer.finished.is_set() and error.code().value[0] == _CANCELLED:
                raise TimedOut(f"no answer from {self._endpoint} within {deadline_s:.3g} s") from error
            raise explained(error, self._endpoint, deadline_s or 0) from error
        finally:
            timer.cancel()

    def hang_up(self) -> None:
        self._over.set()
        self._call.cancel()

    def close(self) -> None:
        with suppress(Exception):
            self.hang_up()


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def explained(error: Any, endpoint: Endpoint, deadline_s: float) -> StoreError | EtcdError:
    """The store's error for gRPC's: etcd's own response, or a sentence about the connection."""
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
        return Unavailable(f"{endpoint} refuses connections: nothing listens there")
    return Unavailable(f"{endpoint} cannot be reached: {text}")
