"""What carries requests to one member of the store: JSON over HTTP, or gRPC. Requests and answers are etcd's JSON form.

That form is the protocol buffers' own JSON mapping (int64 as text, bytes in base64), so one writer and one reader of
it serve both.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.store import Denied

Json = dict[str, Any]


class Rpc(Enum):
    """The calls that are made; the value is the gateway's path below /v3/."""

    RANGE = "kv/range"
    TXN = "kv/txn"
    GRANT = "lease/grant"
    KEEP_ALIVE = "lease/keepalive"
    REVOKE = "lease/revoke"
    WATCH = "watch"
    AUTHENTICATE = "auth/authenticate"
    STATUS = "maintenance/status"


class GatewayOff(Denied):
    """It is an etcd, but does not serve the JSON gateway: another transport may do."""


class Refused(Exception):
    """The member answered with an error: gRPC's code and etcd's text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (code {code})")
        self.code = code
        self.text = text


class Stream(Protocol):
    """Answers that come one by one. One thread reads and closes; any may hang up."""

    def next(self, deadline_s: float | None) -> Json:
        """The next answer, waiting for ever without a deadline. Raises Unavailable at the end, and Refused."""
        ...

    def hang_up(self) -> None:
        """Whoever waits in `next` gets Unavailable at once."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Carrier(Protocol):
    """Calls may come from several threads. `token` is what Authorization carries, "" for nothing.

    Every method may raise Unavailable (TimedOut where the deadline passed), Denied and Refused.
    """

    def version(self, endpoint: Endpoint, token: str, deadline_s: float) -> str:
        """The server's version ("3.5.1"), where it takes calls of this transport. Raises GatewayOff."""
        ...

    def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
        """Ask once; of a stream, the first answer. The deadline is for all of it: name, connection, TLS, answer."""
        ...

    def stream(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Stream:
        """Send the request and leave the answers to the stream. It ends when the member loses its leader."""
        ...

    def close(self) -> None:
        """Let go of connections; streams are their readers'."""
        ...
