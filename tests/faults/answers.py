"""Errors that may come in place of etcd's answer, as etcd 3.4 and 3.5 send them through their JSON gateways.

The texts are etcd's own (api/v3rpc/rpctypes/error.go) and gRPC's. The forms were taken from both versions: a call's
error is one JSON object with gRPC's code; of the two calls that are streams (watch, keep-alive) the error is an object
of its own; a watch that is not permitted begins with status 200 and is cancelled with a reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus

from elaunch.rendezvous.etcd.transport import Rpc

_STREAMS = (Rpc.WATCH, Rpc.KEEP_ALIVE)
# grpc-gateway's HTTPStatusFromCode; 3.4's gateway says 412 for code 9, 3.5's says 400.
_STATUS = {
    1: 408,
    2: 500,
    3: 400,
    4: 504,
    5: 404,
    6: 409,
    7: 403,
    8: 429,
    9: 400,
    10: 409,
    11: 400,
    12: 501,
    13: 500,
    14: 503,
    15: 500,
    16: 401,
}
# A watch tells these errors inside of an answer with status 200.
_CANCELS = {3: "InvalidArgument", 7: "PermissionDenied", 16: "Unauthenticated"}


@dataclass(frozen=True)
class GrpcError:
    """An error of etcd, or of the gRPC server around it."""

    code: int
    text: str

    def __str__(self) -> str:
        return f"{self.text} (gRPC {self.code})"

    def response(self, rpc: Rpc | None, version: str) -> bytes:
        """All that is sent for a request of this kind."""
        if rpc is Rpc.WATCH and self.code in _CANCELS:
            reason = f"rpc error: code = {_CANCELS[self.code]} desc = {self.text}"
            result = {"header": {}, "watch_id": "-1", "created": True, "canceled": True, "cancel_reason": reason}
            return stream_head() + chunk(json.dumps({"result": result}).encode() + b"\n")
        status = 412 if self.code == 9 and version == "3.4" else _STATUS[self.code]
        body = (
            self.stream_error()
            if rpc in _STREAMS
            else json.dumps({"error": self.text, "code": self.code, "message": self.text}).encode()
        )
        if version == "3.4":
            return _head(status, "application/json", "Transfer-Encoding: chunked") + chunk(body) + LAST_CHUNK
        return _head(status, "application/json", f"Content-Length: {len(body)}") + body

    def stream_error(self) -> bytes:
        """The error as a stream tells it."""
        status = _STATUS[self.code]
        about = {"grpc_code": self.code, "http_code": status, "message": self.text}
        return json.dumps({"error": {**about, "http_status": HTTPStatus(status).phrase}}).encode()


@dataclass(frozen=True)
class Page:
    """An answer that is not etcd's JSON, as a proxy or a load balancer in front of etcd sends it."""

    status: int
    body: str
    content_type: str = "text/html"

    def __str__(self) -> str:
        return f"HTTP {self.status} {self.body[:40]!r}"

    def response(self, _rpc: Rpc | None, _version: str) -> bytes:
        body = self.body.encode()
        return _head(self.status, self.content_type, f"Content-Length: {len(body)}") + body


class Fault(Enum):
    """What a network, a proxy or a dying server does to an answer."""

    # The request never reaches etcd.
    HANG = auto()
    RESET = auto()
    GARBAGE = auto()
    # etcd carries out the request, and the client cannot know. A write that is tried again is done twice.
    LOST = auto()
    UNANSWERED = auto()
    CUT = auto()
    DRIP = auto()
    # A watch that begins well.
    STREAM_ENDS = auto()
    STREAM_ERROR = auto()
    STREAM_DEAF = auto()

    def __str__(self) -> str:
        return self.name


Answer = GrpcError | Page | Fault
OF_WATCHES = (Fault.STREAM_ENDS, Fault.STREAM_ERROR, Fault.STREAM_DEAF)

# etcd is there, but cannot carry out the request now.
NO_LEADER = GrpcError(14, "etcdserver: no leader")
LEADER_CHANGED = GrpcError(14, "etcdserver: leader changed")
TIMED_OUT = GrpcError(14, "etcdserver: request timed out")
TIMED_OUT_LEADER_FAILED = GrpcError(14, "etcdserver: request timed out, possibly due to previous leader failure")
TIMED_OUT_CONNECTION_LOST = GrpcError(14, "etcdserver: request timed out, possibly due to connection lost")
SERVER_STOPPED = GrpcError(14, "etcdserver: server stopped")
NOT_CAPABLE = GrpcError(14, "etcdserver: not capable")
UNHEALTHY = GrpcError(14, "etcdserver: unhealthy cluster")
LEARNER = GrpcError(14, "etcdserver: rpc not supported for learner")
TRANSPORT_CLOSING = GrpcError(14, "transport is closing")
TOO_MANY_REQUESTS = GrpcError(8, "etcdserver: too many requests")
CANCELED = GrpcError(1, "context canceled")
# etcd's answer to a grant while it has no leader: the code says "unknown".
CONTEXT_DEADLINE = GrpcError(2, "context deadline exceeded")
DEADLINE_EXCEEDED = GrpcError(4, "context deadline exceeded")
NOT_LEADER = GrpcError(9, "etcdserver: not leader")
ABORTED = GrpcError(10, "etcdserver: request aborted")
INTERNAL = GrpcError(13, "stream terminated by RST_STREAM with error code: INTERNAL_ERROR")
# A person has to do something first.
SPACE_EXCEEDED = GrpcError(8, "etcdserver: mvcc: database space exceeded")
CORRUPT = GrpcError(15, "etcdserver: corrupt cluster")
# The request as it stands is too large.
TOO_LARGE = GrpcError(3, "etcdserver: request is too large")
TOO_LARGE_FOR_GRPC = GrpcError(8, "grpc: received message larger than max (3600008 vs. 2097152)")
TOO_LARGE_OUT_OF_RANGE = GrpcError(11, "grpc: trying to send message larger than max (3600008 vs. 2097152)")
TOO_MANY_OPERATIONS = GrpcError(3, "etcdserver: too many operations in txn request")
# Waiting does not help with these errors.
PERMISSION_DENIED = GrpcError(7, "etcdserver: permission denied")
INVALID_TOKEN = GrpcError(16, "etcdserver: invalid auth token")
NO_USER = GrpcError(3, "etcdserver: user name is empty")
AUTH_FAILED = GrpcError(3, "etcdserver: authentication failed, invalid user ID or password")
OLD_AUTH_REVISION = GrpcError(3, "etcdserver: revision of auth store is old")
AUTH_NOT_ENABLED = GrpcError(9, "etcdserver: authentication is not enabled")
DUPLICATE_KEY = GrpcError(3, "etcdserver: duplicate key given in txn request")
UNKNOWN_METHOD = GrpcError(12, "unknown method Txn for service etcdserverpb.KV")
ALREADY_EXISTS = GrpcError(6, "already exists")
# These have a meaning in the protocol: a lease has ended, or a revision was compacted.
LEASE_NOT_FOUND = GrpcError(5, "etcdserver: requested lease not found")
LEASE_EXISTS = GrpcError(9, "etcdserver: lease already exists")
COMPACTED = GrpcError(11, "etcdserver: mvcc: required revision has been compacted")

BAD_REQUEST = Page(400, "<html><body><h1>400 Bad request</h1></body></html>")
UNAUTHORIZED = Page(401, "<html><head><title>401 Authorization Required</title></head></html>")
FORBIDDEN = Page(403, "<html><head><title>403 Forbidden</title></head></html>")
NOT_FOUND = Page(404, "Not Found\n", "text/plain; charset=utf-8")
BODY_TOO_LARGE = Page(413, "<html><head><title>413 Request Entity Too Large</title></head></html>")
RATE_LIMITED = Page(429, "<html><head><title>429 Too Many Requests</title></head></html>")
SERVER_ERROR = Page(500, "<html><head><title>500 Internal Server Error</title></head></html>")
BAD_GATEWAY = Page(
    502, "<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body><center>nginx</center></body>\r\n</html>"
)
NO_SERVER = Page(503, "<html><body><h1>503 Service Unavailable</h1>No server is available.</body></html>")
GATEWAY_TIMEOUT = Page(504, "<html><head><title>504 Gateway Time-out</title></head></html>")
LOGIN_PAGE = Page(200, "<html><title>Please log in</title></html>")
OTHER_JSON = Page(200, '{"result": 7, "header": ["no"], "kvs": 1}', "application/json")

GRPC_ERRORS = tuple(value for value in globals().values() if isinstance(value, GrpcError))
PAGES = tuple(value for value in globals().values() if isinstance(value, Page))
ALL: tuple[Answer, ...] = (*GRPC_ERRORS, *PAGES, *Fault)
# A job may go on after these: an agent that gets one in a thousand requests has not lost its store.
MAY_PASS: tuple[Answer, ...] = (
    *(NO_LEADER, LEADER_CHANGED, TIMED_OUT, TIMED_OUT_LEADER_FAILED, TIMED_OUT_CONNECTION_LOST, SERVER_STOPPED),
    *(UNHEALTHY, TRANSPORT_CLOSING, TOO_MANY_REQUESTS, CANCELED, CONTEXT_DEADLINE, DEADLINE_EXCEEDED, ABORTED),
    *(INTERNAL, SPACE_EXCEEDED, RATE_LIMITED, SERVER_ERROR, BAD_GATEWAY, NO_SERVER, GATEWAY_TIMEOUT),
    *(each for each in Fault if each is not Fault.GARBAGE),
)

LAST_CHUNK = b"0\r\n\r\n"


def fits(answer: Answer, rpc: Rpc | None) -> bool:
    """Whether a request of this kind can be answered so."""
    return rpc is Rpc.WATCH or answer not in OF_WATCHES


def stream_head() -> bytes:
    """How a stream begins."""
    return _head(200, "application/json", "Transfer-Encoding: chunked")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _head(status: int, content_type: str, framing: str) -> bytes:
    lines = (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {content_type}", framing)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
