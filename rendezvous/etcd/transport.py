"""The interface of a transport, which sends requests to one member of the store; and etcd's JSON gateway, `POST /v3/…`.

Requests and responses have etcd's JSON form: the JSON mapping of protocol buffers (int64 as text, bytes in base64). So
this transport and the one over gRPC share one codec.
"""

from __future__ import annotations

import json
import ssl
from enum import Enum
from typing import Any, Protocol

from elaunch.rendezvous.codec import shown
from elaunch.rendezvous.dial import Deadline
from elaunch.rendezvous.endpoint import Endpoint, Tls
from elaunch.rendezvous.etcd.http_client import ClientConnection, HttpClient
from elaunch.rendezvous.store import Denied, Rejected, StoreError, Unavailable
from elaunch.strict_json import parse_json

Json = dict[str, Any]


class Rpc(Enum):
    """The calls; the value is the gateway's path below /v3/."""

    RANGE = "kv/range"
    TXN = "kv/txn"
    GRANT = "lease/grant"
    KEEP_ALIVE = "lease/keepalive"
    REVOKE = "lease/revoke"
    WATCH = "watch"
    AUTHENTICATE = "auth/authenticate"
    STATUS = "maintenance/status"


class GatewayOff(Denied):
    """This etcd does not serve the JSON gateway; another transport may work."""


class EtcdError(Exception):
    """The member's error: gRPC's code and etcd's text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (code {code})")
        self.code = code
        self.text = text


class ResponseStream(Protocol):
    """Responses that arrive one by one. One thread reads and closes; any thread may hang up."""

    def next(self, deadline_s: float | None) -> Json:
        """The next response; without a deadline it waits forever. Raises Unavailable at the end, and EtcdError."""

    def hang_up(self) -> None:
        """End the stream: a thread that waits in `next` gets Unavailable immediately."""

    def close(self) -> None:
        """Release the stream's resources."""


class RpcTransport(Protocol):
    """Sends requests to members; thread-safe. `token` goes into the Authorization header, unless "".

    Every method may raise Unavailable (TimedOut if the deadline passed), Denied and EtcdError.
    """

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        """The server's version ("3.5.1"). Raises GatewayOff if it does not take calls of this transport."""

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        """One request; of a stream, the first response. The deadline covers DNS, connect, TLS and response."""

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> ResponseStream:
        """Send the request and return the stream of responses. It ends when the member loses its leader."""

    def close(self) -> None:
        """Close the connections. Streams belong to their readers and stay open."""


# A line of a watch holds one transaction: 1.5 MiB, in base64.
_LINE_BYTES_MAX = 1 << 23
# Characters of an error's text, which goes to the log.
_TEXT_MAX = 1000
_GATEWAY_OFF = (
    "the JSON gateway of {} is off; start etcd with --enable-grpc-gateway=true, or pip install 'elaunch[etcd3]' and "
    "use --rdzv-conf transport=grpc"
)
# These versions had the gateway at another path, or none.
_BEFORE_THE_GATEWAY = ("2.", "3.0.", "3.1.", "3.2.", "3.3.")
# gRPC's code for "unavailable", its highest code, and the codes for HTTP statuses that come without one.
_UNAVAILABLE = 14
_CODE_MAX = 16
_NO_SUCH_PAGE = (404, 405, 410)
_CODES = {400: 3, 401: 16, 403: 7, 405: 12, 413: 11}
_TOO_MANY_REQUESTS = 429


class JsonTransport:
    """An `RpcTransport` over HTTP/1.1. A `bearer` replaces the token of every request."""

    def __init__(self, tls: Tls | ssl.SSLContext | None = None, bearer: str = "") -> None:
        self._client = HttpClient(tls)
        self._bearer = f"Bearer {bearer}" if bearer else ""

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        headers = self._headers(token)
        try:
            status, body = self._client.request(endpoint, "POST", f"/v3/{Rpc.STATUS.value}", headers, b"{}", deadline_s)
        except Unavailable:
            if scheme := self._client.other_scheme(endpoint, deadline_s):
                raise Denied(f"{endpoint} accepts {scheme} only; use {scheme}://{endpoint}") from None
            raise
        # A server that lacks this path or POST, or succeeds without JSON, may be an old etcd, an etcd without its
        # gateway, or no etcd.
        is_page = status < 400 and _object(body) is None
        found = {} if is_page or status in (*_NO_SUCH_PAGE, 501) else _parsed(endpoint, status, body)
        if "version" in found:
            return str(found["version"])
        # Every etcd has /version, even without the gateway.
        status, body = self._client.request(endpoint, "GET", "/version", headers, b"", deadline_s)
        return _version_without_gateway(endpoint, status, body)

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        status, body = self._client.request(
            endpoint, "POST", f"/v3/{rpc.value}", self._headers(token), _body(request), deadline_s
        )
        # The responses of a stream are lines; take the first.
        return _parsed(endpoint, status, body.partition(b"\n")[0])

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> JsonStream:
        deadline = Deadline(deadline_s)
        connection = self._client.open(endpoint, deadline)
        headers = {**self._headers(token), "Grpc-Metadata-hasleader": "true"}
        try:
            status = connection.request("POST", f"/v3/{rpc.value}", headers, _body(request), deadline)
            if status != 200:
                _parsed(endpoint, status, connection.body(deadline))
        except BaseException:
            connection.close()
            raise
        return JsonStream(endpoint, connection)

    def close(self) -> None:
        self._client.close()

    def _headers(self, token: str) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": self._bearer or token}


class JsonStream:
    """Responses as lines of JSON. etcd puts empty lines between them."""

    def __init__(self, endpoint: Endpoint, connection: ClientConnection) -> None:
        self._endpoint = endpoint
        self._connection = connection

    def next(self, deadline_s: float | None) -> Json:
        deadline = None if deadline_s is None else Deadline(deadline_s)
        while True:
            line = self._connection.line(deadline, _LINE_BYTES_MAX)
            if len(line) >= _LINE_BYTES_MAX:
                raise Unavailable(f"{self._endpoint} sent a response of more than {_LINE_BYTES_MAX} bytes")
            if not line.endswith(b"\n"):
                raise Unavailable(f"{self._endpoint} ended the stream")
            if line.strip():
                return _parsed(self._endpoint, 200, line)

    def hang_up(self) -> None:
        self._connection.hang_up()

    def close(self) -> None:
        self._connection.close()


def _body(request: Json) -> bytes:
    return json.dumps(request, separators=(",", ":")).encode()


def _object(body: bytes) -> Json | None:
    """The JSON object in `body`; None if it is something else."""
    try:
        value = parse_json(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _version_without_gateway(endpoint: Endpoint, status: int, body: bytes) -> str:
    """The version of an etcd that is too old. Raises GatewayOff for a newer one, Denied for another server."""
    response = _object(body)
    if status == 200 and response and "etcdserver" in response:
        version = str(response["etcdserver"])
        if not version.startswith(_BEFORE_THE_GATEWAY):
            raise GatewayOff(_GATEWAY_OFF.format(endpoint))
        return version
    # Other statuses may come from a proxy in front of an etcd: it fails, or requires a login.
    if status >= 400 and status not in _NO_SUCH_PAGE:
        raise _by_status(endpoint, status, body, "to /version")
    text = body[:80].decode(errors="replace").strip()
    raise Denied(
        f"what listens at {endpoint} is not an etcd: it answers /version with HTTP status {status} and {text!r};"
        " name an etcd, or a free port of one of the nodes"
    )


def _parsed(endpoint: Endpoint, status: int, body: bytes) -> Json:
    response = _object(body)
    if response is None:
        raise _by_status(endpoint, status, body, "and no JSON")
    error = response.get("error")
    # In a stream an error is a JSON object.
    if isinstance(error, dict):
        code, message = error.get("grpc_code") or error.get("code"), error.get("message", error)
    elif error is not None or status != 200:
        code, message = response.get("code"), response.get("message") or error or response
    else:
        result = response.get("result", response)
        return result if isinstance(result, dict) else response
    text = message[:_TEXT_MAX] if isinstance(message, str) else shown(message)
    if type(code) is int and 0 < code <= _CODE_MAX:
        raise EtcdError(code, text)
    if status == 200:
        raise EtcdError(_UNAVAILABLE, text)
    raise _by_status(endpoint, status, body, "and no code of etcd's")


def _by_status(endpoint: Endpoint, status: int, body: bytes, lacking: str) -> StoreError | EtcdError:
    """The error for a response that is not etcd's: the page of a proxy, or its JSON."""
    text = " ".join(body[:200].decode(errors="replace").split())[:80]
    if status == 404:
        return GatewayOff(_GATEWAY_OFF.format(endpoint))
    if status in _CODES:
        return EtcdError(_CODES[status], f"HTTP status {status}: {text!r}")
    what = f"{endpoint} answers with HTTP status {status} {lacking}: {text!r}"
    if status == _TOO_MANY_REQUESTS:
        return Unavailable(what)
    return Rejected(f"{what}; is a proxy in front of it, and does the proxy pass requests on?")
