"""The interface of a transport, which sends requests to one member of the store: JSON over HTTP, or gRPC.

Requests and answers have etcd's JSON form: the JSON mapping of protocol buffers (int64 as text, bytes in base64). So
both transports share one writer and one reader.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.store import Denied

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
    """The member answered with an error: gRPC's code and etcd's text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (code {code})")
        self.code = code
        self.text = text


class AnswerStream(Protocol):
    """Answers that arrive one by one. One thread reads and closes; any thread may hang up."""

    def next(self, deadline_s: float | None) -> Json:
        """The next answer; without a deadline it waits forever. Raises Unavailable at the end, and EtcdError."""
        ...

    def hang_up(self) -> None:
        """End the stream: a thread that waits in `next` gets Unavailable at once."""
        ...

    def close(self) -> None:
        """Release the stream's resources."""
        ...


class RpcTransport(Protocol):
    """Sends requests to members; safe for several threads. `token` goes into the Authorization header, unless "".

    Every method may raise Unavailable (TimedOut if the deadline passed), Denied and EtcdError.
    """

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        """The server's version ("3.5.1"). Raises GatewayOff if it does not take calls of this transport."""
        ...

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        """Ask once; for a stream, return its first answer. The deadline covers name, connection, TLS and answer."""
        ...

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> AnswerStream:
        """Send the request and return the stream of answers. It ends when the member loses its leader."""
        ...

    def close(self) -> None:
        """Close the connections. Streams belong to their readers and stay open."""
        ...
