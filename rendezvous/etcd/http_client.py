"""HTTP/1.1 with the standard library's parser, with one deadline for a whole call."""

from __future__ import annotations

import errno
import http.client
import io
import os
import select
import socket
import ssl
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from elaunch.rendezvous.dial import Deadline, NoResponse, dial, is_silence, resolve
from elaunch.rendezvous.endpoint import Endpoint, Tls
from elaunch.rendezvous.format import shortage
from elaunch.rendezvous.store import Denied, OwnLimit, StoreError, TimedOut, Unavailable

# The keys of a job with 4096 failed nodes are 24 MB. Parsing a hostile response takes 25 times its size in memory.
RESPONSE_BYTES_MAX = 1 << 25
_RECEIVE_BYTES = 1 << 16
_IDLE_CONNECTIONS_MAX = 4
# OpenSSL's names of the alerts by which a server rejects the client's certificate.
_CLIENT_ALERTS = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")


class _Incoming(io.RawIOBase):
    """What arrives on a socket, as the stream that HTTPResponse reads. A read ends with `deadline`, if there is one."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.deadline: Deadline | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._source.settimeout(self.deadline.left_to_read() if self.deadline else None)
        return self._source.recv_into(buffer)

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(self, _RECEIVE_BYTES)


class ClientConnection:
    """One connection to a server, for one request at a time. Every method may raise Unavailable or Denied.

    Without `context` there is no TLS. `hint` is what the user should check if a server's certificate is not trusted.
    """

    def __init__(
        self, endpoint: Endpoint, deadline: Deadline, context: ssl.SSLContext | None = None, hint: str = ""
    ) -> None:
        self._endpoint = endpoint
        self._hint = hint
        self._pid = os.getpid()
        self._response: http.client.HTTPResponse | None = None
        with self._explained(deadline):
            self._socket = _connect(endpoint, context, deadline)
        self._incoming = _Incoming(self._socket)

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes, deadline: Deadline) -> int:
        """Send a request. Returns the status of the response; read its body with `body` or `line`."""
        data = request_bytes(method, str(self._endpoint), path, headers, body)
        self._incoming = _Incoming(self._socket)
        self._incoming.deadline = deadline
        with self._explained(deadline):
            self._socket.settimeout(deadline.left())
            self._socket.sendall(data)
            self._response = http.client.HTTPResponse(self._incoming, method=method)  # type: ignore[arg-type]
            self._response.begin()
            return self._response.status

    def line(self, deadline: Deadline | None, bytes_max: int) -> bytes:
        """The next line of the body; b"" at its end. Without a deadline it waits forever."""
        assert self._response
        self._incoming.deadline = deadline
        with self._explained(deadline):
            return self._response.readline(bytes_max)

    def body(self, deadline: Deadline) -> bytes:
        assert self._response
        self._incoming.deadline = deadline
        with self._explained(deadline):
            if (length := self._response.length) is not None and length <= RESPONSE_BYTES_MAX:
                return self._response.read()
            pieces, size = [], length or 0
            while size <= RESPONSE_BYTES_MAX and (piece := self._response.read1(_RECEIVE_BYTES)):
                pieces.append(piece)
                size += len(piece)
        if size > RESPONSE_BYTES_MAX:
            raise Unavailable(f"{self._endpoint} sent a response of more than {RESPONSE_BYTES_MAX} bytes")
        return b"".join(pieces)

    def usable(self) -> bool:
        """Whether another request may be sent: this process opened it, the last response is complete, no data waits."""
        response = self._response
        if response is None or response.will_close or not response.isclosed() or self._pid != os.getpid():
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

    @contextmanager
    def _explained(self, deadline: Deadline | None) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
            raise connection_error(error, self._endpoint, str(deadline or ""), self._hint) from error


class HttpClient:
    """Requests to several servers, over persistent connections. Safe for several threads."""

    def __init__(self, tls: Tls | ssl.SSLContext | None = None) -> None:
        self._context: ssl.SSLContext | None
        if isinstance(tls, Tls):
            self._context, self._hint = context(tls), "is the CA the right one?"
        else:
            self._context, self._hint = tls, "is ELAUNCH_TOKEN that of the elaunch that runs there?"
        self._idle: defaultdict[Endpoint, deque[ClientConnection]] = defaultdict(deque)

    def request(
        self, endpoint: Endpoint, method: str, path: str, headers: dict[str, str], body: bytes, deadline_s: float
    ) -> tuple[int, bytes]:
        """The status and the body of the response."""
        deadline = Deadline(deadline_s)
        idle = self._idle[endpoint]
        connection = _take(idle) or self.open(endpoint, deadline)
        try:
            response = connection.request(method, path, headers, body, deadline), connection.body(deadline)
        except BaseException:
            connection.close()
            raise
        if len(idle) < _IDLE_CONNECTIONS_MAX and connection.usable():
            idle.append(connection)
        else:
            connection.close()
        return response

    def open(self, endpoint: Endpoint, deadline: Deadline) -> ClientConnection:
        """A new connection, which belongs to the caller."""
        return ClientConnection(endpoint, deadline, self._context, self._hint)

    def other_scheme(self, endpoint: Endpoint, deadline_s: float) -> str:
        """The scheme, `http` or `https`, of the server if it is not the one in use; else ""."""
        with suppress(OSError):
            is_plain = certificate_at(endpoint, unverified_context(), deadline_s) is None
            if is_plain == bool(self._context):
                return "http" if is_plain else "https"
        return ""

    def close(self) -> None:
        for idle in list(self._idle.values()):
            while connection := _take(idle):
                connection.close()


def context(tls: Tls) -> ssl.SSLContext:
    """A client's TLS context. Raises Denied if a file is missing or wrong."""
    try:
        made = ssl.create_default_context(cafile=tls.ca)
        # Python's default from 3.13 on: it refuses certificates that lack an extension, which etcd's clients accept.
        made.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if tls.certificate:
            made.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ValueError) as error:
        files = ", ".join(name for name in (tls.ca, tls.certificate, tls.key) if name)
        raise Denied(f"the certificate files cannot be used ({files}): {error}") from error
    return made


def unverified_context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    return made


def certificate_at(endpoint: Endpoint, context: ssl.SSLContext, deadline_s: float) -> bytes | None:
    """The certificate (DER) of the server there; None if it speaks plain HTTP, as an etcd without TLS does.

    Empty if the server requires a certificate of the client. Raises OSError.
    """
    try:
        with closing(_connect(endpoint, context, Deadline(deadline_s))) as connected:
            assert isinstance(connected, ssl.SSLSocket)
            return connected.getpeercert(binary_form=True) or b""
    except ssl.SSLCertVerificationError:
        raise
    except (ssl.SSLError, ConnectionError, TimeoutError) as error:
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            return b""
        # An etcd without TLS closes the connection or waits for more. A server with TLS may do so under load.
        deadline = Deadline(deadline_s)
        with suppress(StoreError), closing(ClientConnection(endpoint, deadline)) as plain:
            plain.request("GET", "/version", {}, b"", deadline)
            return None
        raise


def request_bytes(method: str, host: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    """A request with its body. Raises ValueError if a header contains a line break."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if value]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header holds a line break")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def connection_error(error: Exception, endpoint: Endpoint, waited: str, hint: str) -> StoreError:
    """The store's error for `error`, as a sentence.

    `waited` is the deadline that passed ("0.5 s"; "" is without one). `hint` is what the user should check if the
    server is not trusted.
    """
    match error:
        case ssl.SSLError():
            return _tls_error(error, endpoint, hint)
        case socket.gaierror():
            return Unavailable(f"the name {endpoint.host} cannot be resolved: {error.strerror}")
        case NoResponse():
            return _silent(TimedOut(f"no answer from {endpoint} within {waited}"))
        case TimeoutError():
            if not waited or error.errno:
                return _silent(Unavailable(f"{endpoint} is unreachable: its host does not acknowledge what was sent"))
            return TimedOut(f"no answer from {endpoint} within {waited}")
        case ConnectionRefusedError():
            return Unavailable(f"{endpoint} refuses connections: nothing listens there")
        case ConnectionError():
            return Unavailable(f"{endpoint} ended the connection")
        case http.client.BadStatusLine():
            start = str(error)
            if start.startswith("\x15\x03"):
                return Denied(f"{endpoint} speaks TLS; use https://{endpoint}")
            return Denied(f"{endpoint} does not speak HTTP: {start[:40]!r}; is that the store's client port?")
        case OSError() if is_silence(error):
            return _silent(Unavailable(f"{endpoint} cannot be reached: {error.strerror or error}"))
        case OSError() if why := shortage(error):
            running = f", or prlimit --pid {os.getpid()} --nofile=4096" if error.errno == errno.EMFILE else ""
            return OwnLimit(why + running)
        case OSError():
            ports = " (are all local ports in use? ss -s; sysctl net.ipv4.ip_local_port_range)"
            advice = ports if error.errno == errno.EADDRNOTAVAIL else ""
            return OwnLimit(f"this host opens no connection to {endpoint}: {error.strerror or error}{advice}")
        case _:
            return Unavailable(f"{endpoint} sent a malformed response ({type(error).__name__}: {error})")


def _silent(error: Unavailable) -> Unavailable:
    error.is_silent = True
    return error


def _tls_error(error: ssl.SSLError, endpoint: Endpoint, hint: str) -> StoreError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Denied(f"{endpoint}: its certificate is not trusted: {error.verify_message}; {hint}")
    reason = error.reason or ""
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason or "RECORD_LAYER_FAILURE" in reason:
        return Denied(f"{endpoint} does not speak TLS; use http://{endpoint}")
    if any(alert in reason for alert in _CLIENT_ALERTS):
        return Denied(f"{endpoint} requires a client certificate that it trusts ({reason.lower().replace('_', ' ')})")
    if "EOF" in reason or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return Unavailable(f"{endpoint} ended the connection")
    return Unavailable(f"{endpoint}: TLS failed: {reason or error}")


def _take(idle: deque[ClientConnection]) -> ClientConnection | None:
    # Another thread may take the last one.
    with suppress(IndexError):
        while True:
            connection = idle.pop()
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
