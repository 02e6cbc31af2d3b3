"""HTTP/1.1 over a socket, with one deadline for a whole call."""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from elaunch.rendezvous.endpoint import Endpoint, Tls
from elaunch.rendezvous.http.dial import dial
from elaunch.rendezvous.http.errors import connection_error
from elaunch.rendezvous.http.resolve import resolve
from elaunch.rendezvous.http.response import Garbled, ResponseReader, request
from elaunch.rendezvous.store import Denied, StoreError, TimedOut, Unavailable

# The keys of a job with 4096 failed nodes are 24 MB. To parse a hostile answer takes 25 times its bytes of memory.
ANSWER_BYTES_MAX = 1 << 25
_RECEIVE_BYTES = 1 << 16
_IDLE_CONNECTIONS_MAX = 4
_MOMENT_S = 0.001


class Deadline:
    """A point in time; `left` says how many seconds remain."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end_s = time.monotonic() + seconds

    def left(self) -> float:
        """The remaining seconds. Raises TimeoutError if there are none."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def left_to_read(self) -> float:
        """The remaining seconds, and after the deadline a moment to read what has arrived already.

        The answer may be here while this thread had to wait for a processor. Raises TimeoutError once twice the time
        has passed.
        """
        left_s = self._end_s - time.monotonic()
        if left_s <= -self._seconds:
            raise TimeoutError
        return max(left_s, _MOMENT_S)

    def __str__(self) -> str:
        return f"{self._seconds:.3g} s"


@dataclass(frozen=True)
class Trust:
    """How a client recognises its servers by TLS. Without `context` there is no TLS.

    `hint` tells the user what to check if a server's certificate is not trusted.
    """

    context: ssl.SSLContext | None = None
    hint: str = ""


class ClientConnection:
    """One connection to a server, for one request at a time. Every method may raise Unavailable or Denied."""

    def __init__(self, endpoint: Endpoint, trust: Trust, deadline: Deadline) -> None:
        self._endpoint = endpoint
        self._trust = trust
        self._reply = ResponseReader()
        self._pid = os.getpid()
        self._body: deque[bytes] = deque()
        with self._explained(deadline):
            self._socket = _connect(endpoint, trust.context, deadline)

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes, deadline: Deadline) -> ResponseReader:
        """Send a request and read the head of its answer; read the body with `piece`."""
        data = request(method, str(self._endpoint), path, headers, body)
        self._reply = ResponseReader()
        self._body.clear()
        with self._explained(deadline):
            self._socket.settimeout(deadline.left())
            self._socket.sendall(data)
            while not self._reply.status:
                self._receive(deadline)
        return self._reply

    def piece(self, deadline: Deadline | None) -> bytes:
        """The next piece of the body; b"" at its end. Without a deadline it waits forever."""
        with self._explained(deadline):
            while not self._body:
                if self._reply.finished:
                    return b""
                self._receive(deadline)
        return self._body.popleft()

    def body(self, deadline: Deadline) -> bytes:
        """The whole body."""
        pieces, size = [], 0
        while piece := self.piece(deadline):
            pieces.append(piece)
            size += len(piece)
            if size > ANSWER_BYTES_MAX:
                raise Unavailable(f"{self._endpoint} sent an answer of more than {ANSWER_BYTES_MAX} bytes")
        return b"".join(pieces)

    def usable(self) -> bool:
        """Whether another request may be sent: this process opened it, the last answer is complete, no data waits."""
        if not self._reply.reusable or not self._reply.finished or self._pid != os.getpid():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def hang_up(self) -> None:
        """End the connection, from any thread; a thread that reads from it wakes up. `close` must still be called."""
        # The plain socket's method: the TLS socket's method would first drop the TLS state that the reader uses.
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, deadline: Deadline | None) -> None:
        self._socket.settimeout(deadline.left_to_read() if deadline else None)
        if data := self._socket.recv(_RECEIVE_BYTES):
            if piece := self._reply.feed(data):
                self._body.append(piece)
        else:
            self._reply.end()

    @contextmanager
    def _explained(self, deadline: Deadline | None) -> Iterator[None]:
        try:
            yield
        except (OSError, Garbled) as error:
            raise connection_error(error, self._endpoint, str(deadline or ""), self._trust.hint) from error


class HttpClient:
    """Requests to several servers, over connections that are kept and used again. Safe for several threads."""

    def __init__(self, tls: Tls | ssl.SSLContext | None = None) -> None:
        if isinstance(tls, Tls):
            self._trust = Trust(context(tls), "is the CA the right one?")
        else:
            self._trust = Trust(tls, "is ELAUNCH_TOKEN that of the elaunch that runs there?")
        self._idle: defaultdict[Endpoint, deque[ClientConnection]] = defaultdict(deque)

    def ask(
        self, endpoint: Endpoint, method: str, path: str, headers: dict[str, str], body: bytes, deadline_s: float
    ) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        deadline = Deadline(deadline_s)
        idle = self._idle[endpoint]
        kept = _take(idle)
        connection = kept or ClientConnection(endpoint, self._trust, deadline)
        try:
            try:
                reply = connection.ask(method, path, headers, body, deadline)
            except TimedOut:
                raise
            except Unavailable:
                # The server may have closed the kept connection while the request was on its way.
                if not kept:
                    raise
                connection.close()
                connection = ClientConnection(endpoint, self._trust, deadline)
                reply = connection.ask(method, path, headers, body, deadline)
            answer = reply.status, connection.body(deadline)
        except BaseException:
            connection.close()
            raise
        if len(idle) < _IDLE_CONNECTIONS_MAX and connection.usable():
            idle.append(connection)
        else:
            connection.close()
        return answer

    def open(self, endpoint: Endpoint, deadline: Deadline) -> ClientConnection:
        """A new connection that belongs to the caller, for an answer without an end."""
        return ClientConnection(endpoint, self._trust, deadline)

    def other_scheme(self, endpoint: Endpoint, deadline_s: float) -> str:
        """The scheme, `http` or `https`, that the server answers if it is not the one in use; else ""."""
        deadline = Deadline(deadline_s)
        if self._trust.context:
            with suppress(StoreError), closing(ClientConnection(endpoint, Trust(), deadline)) as plain:
                plain.ask("GET", "/version", {}, b"", deadline)
                return "http"
            return ""
        try:
            with closing(_connect(endpoint, ssl._create_unverified_context(), deadline)):
                return "https"
        except ssl.SSLError as error:
            # A TLS alert: the server speaks TLS, and refuses this client.
            return "https" if "ALERT" in (error.reason or "") else ""
        except OSError:
            return ""

    def close(self) -> None:
        """Close the kept connections."""
        for idle in list(self._idle.values()):
            while connection := _take(idle):
                connection.close()


def context(tls: Tls) -> ssl.SSLContext:
    """A client's TLS context. Raises Denied if a file is missing or wrong."""
    try:
        made = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate:
            made.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ValueError) as error:
        files = ", ".join(name for name in (tls.ca, tls.certificate, tls.key) if name)
        raise Denied(f"the certificate files cannot be used ({files}): {error}") from error
    return made


def _take(idle: deque[ClientConnection]) -> ClientConnection | None:
    while idle:
        try:
            connection = idle.pop()
        except IndexError:
            # Another thread was faster.
            return None
        if connection.usable():
            return connection
        connection.close()
    return None


def _connect(endpoint: Endpoint, context: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    connected = dial(resolve(endpoint.host, endpoint.port, deadline.left()), deadline.left)
    try:
        if not context:
            return connected
        connected = context.wrap_socket(connected, server_hostname=endpoint.host, do_handshake_on_connect=False)
        connected.settimeout(deadline.left())
        connected.do_handshake()
        return connected
    except BaseException:
        connected.close()
        raise
