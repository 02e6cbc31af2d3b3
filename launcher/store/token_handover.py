"""Brings the token of a head's store to the nodes that the same scheduler started: from a shared home, or by munge.

The head listens on the port after the store's. It sends every client the name of its job, a fingerprint of its token,
and the token in a munge credential that only the same user can open. A node whose home has the same key makes the same
token, and recognises it by the fingerprint. Another node opens the credential. Nobody else can use these answers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elaunch.launcher.cluster.home_key import token_at_home
from elaunch.launcher.errors import SiteError
from elaunch.launcher.options.secret_file import TOKEN_LINE
from elaunch.launcher.options.values import PORT_MAX
from elaunch.launcher.store.head import START_S, listen
from elaunch.launcher.store.munge import MungeFailed, seal, unseal
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.discovery import speaks_http
from elaunch.rendezvous.http.client import Deadline
from elaunch.rendezvous.http.dial import dial
from elaunch.rendezvous.http.resolve import resolve
from elaunch.strict_json import parse_json

# A credential is made again after this time. munge's own limit is 300 s, unless the site changes it.
_SEALED_S = 60.0
_CALL_S = 2.0
# The limit for the whole answer of a head, with the look-up of its name. The head may have to call munge first.
_EXCHANGE_S = 5.0
_PAUSE_S, _PAUSE_MAX_S = 0.1, 2.0
# A node that waits longer tells the user why. A shared disk may show a new file that much later.
_PATIENCE_S = 60.0
# After a failure of munge the head tries again.
_SEAL_AGAIN_S = 5.0
# The port of a head's store listens before the process of that store runs, and the head offers its token after that.
_OFFERED_S = START_S + 5.0
# Much more than a head sends, and still little memory.
_BYTES_MAX = 64 << 10
_SHOWN_CHARACTERS = 100

_NO_HEAD = "the program that listens there is no head of a job"


@dataclass(frozen=True)
class Meeting:
    """Where a job's nodes meet. `name` belongs to one run of one job of this user.

    `may_be_etcd` is true if somebody typed the endpoint, and so may mean an etcd.
    """

    endpoint: Endpoint
    name: str
    may_be_etcd: bool = False

    @property
    def port(self) -> Endpoint:
        """The endpoint of the handover: the next port, or the port before if the store has the last one."""
        port = self.endpoint.port
        return Endpoint(self.endpoint.host, port + 1 if port < PORT_MAX else port - 1)


class AnotherJob(SiteError):
    """The head of another job listens at this job's endpoint."""


class Offer:
    """The head's side, until `close`. Raises UsageError or SiteError if its port is not available."""

    def __init__(self, meeting: Meeting, token: str) -> None:
        self._meeting = meeting
        self._token = token
        self._sealed: tuple[float, str] | None = None
        self._is_closed = threading.Event()
        bound = listen(meeting.port)
        if bound is None:
            raise port_taken_error(meeting.endpoint, meeting.port)
        self._listener = bound.listener
        threading.Thread(target=self._serve, name="elaunch-handover", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        # `shutdown` wakes a thread in accept(). `close` alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        hello = json.dumps([self._meeting.name, _fingerprint(self._token)])
        while not self._is_closed.is_set():
            try:
                asking, _ = self._listener.accept()
            except OSError:
                # For example no free descriptor: that passes.
                self._is_closed.wait(_PAUSE_S)
                continue
            with asking, suppress(OSError):
                # The answer fits into the kernel's buffer, so a slow client does not delay the head.
                asking.setblocking(False)
                asking.sendall(f"{hello}\n".encode())
                asking.sendall(self._credential().encode())

    def _credential(self) -> str:
        """The credential, the same for all clients within a minute. If munge fails, it is empty for a few seconds."""
        now_s = time.monotonic()
        if self._sealed is None or now_s > self._sealed[0]:
            try:
                self._sealed = (now_s + _SEALED_S, seal(json.dumps([self._meeting.name, self._token])))
            except MungeFailed:
                self._sealed = (now_s + _SEAL_AGAIN_S, "")
        return self._sealed[1]


def fetch(meeting: Meeting, wait_s: float, say: Callable[[str], None]) -> str:
    """Ask the head for its token, for up to `wait_s` seconds. Empty if an etcd listens at the endpoint instead.

    A wrong token does no harm: it opens no store. The caller tells the user if an etcd listens there. Raises SiteError.
    """
    begun_s = time.monotonic()
    listens_s: float | None = None
    is_said = False
    pause_s = _PAUSE_S
    while True:
        patience_s = _PATIENCE_S
        listens = True
        if meeting.may_be_etcd and _is_etcd(meeting.endpoint):
            return ""
        try:
            return _ask(meeting)
        except MungeFailed as error:
            trouble = f"no key in ~/.elaunch on this node is the head's key, and munge does not work: {error}"
        except OSError as error:
            trouble, patience_s = f"{meeting.port}: {error.strerror or error}", _OFFERED_S
            listens = _listens(meeting.endpoint)
        now_s = time.monotonic()
        listens_s = (listens_s or now_s) if listens else None
        if now_s - begun_s > wait_s or (listens_s and now_s - listens_s > patience_s):
            raise SiteError(
                f"the token of the job's store did not come from {meeting.endpoint.host} ({trouble}); give all nodes"
                f" the same token, for example in the job's script before srun: {TOKEN_LINE}"
            )
        if now_s - begun_s > _PATIENCE_S and not is_said:
            say(f"still waiting for {meeting.endpoint.host}: {trouble}")
            is_said = True
        # Many nodes ask one head: spread them over time.
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(1.5 * pause_s, _PAUSE_MAX_S)


def port_taken_error(endpoint: Endpoint, port: Endpoint) -> SiteError:
    """The error of a head that finds one of its two ports taken."""
    return SiteError(
        f"another program has port {port.port}, at which this node was to serve the job's store;"
        f" choose a free port whose next port is free too: --rdzv-endpoint {endpoint.host}:PORT"
    )


def _is_etcd(endpoint: Endpoint) -> bool:
    """Whether a server without TLS listens at `endpoint`."""
    try:
        return speaks_http(endpoint, _CALL_S)
    except OSError:
        return False


def _listens(endpoint: Endpoint) -> bool:
    try:
        _connected(endpoint, Deadline(_CALL_S)).close()
    except OSError:
        return False
    return True


def _connected(place: Endpoint, deadline: Deadline) -> socket.socket:
    return dial(resolve(place.host, place.port, deadline.left()), deadline.left)


def _ask(meeting: Meeting) -> str:
    """The head's token. Raises AnotherJob, OSError, and MungeFailed if this node cannot read the token."""
    place, deadline = meeting.port, Deadline(_EXCHANGE_S)
    with _connected(place, deadline) as stream:
        words = _HeadReader(stream, deadline)
        name, fingerprint = _pair(words.line())
        if name != meeting.name:
            raise _another(meeting, name)
        token = token_at_home(name)
        if token and hmac.compare_digest(_fingerprint(token).encode(), fingerprint.encode(errors="replace")):
            return token
        credential = words.rest()
    if not credential:
        raise MungeFailed(f"{place.host} sent no credential")
    # A stranger at the port could pass on the credential of another job's head.
    name, token = _pair(unseal(credential))
    if name != meeting.name:
        raise _another(meeting, name)
    return token


class _HeadReader:
    """Reads a head's answer, until `deadline` at the latest. Raises OSError, also if the answer comes too slowly."""

    def __init__(self, stream: socket.socket, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline
        self._heard = b""

    def line(self) -> str:
        while b"\n" not in self._heard and self._hear():
            pass
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode(errors="replace")

    def rest(self) -> str:
        while self._hear():
            pass
        return self._heard.decode(errors="replace")

    def _hear(self) -> bool:
        """Read some more. Returns False at the end of the answer."""
        try:
            self._stream.settimeout(self._deadline.left())
            piece = self._stream.recv(_BYTES_MAX)
        except TimeoutError:
            raise TimeoutError(f"the program that listens there gave no whole answer within {self._deadline}") from None
        self._heard += piece
        if len(self._heard) > _BYTES_MAX:
            raise ConnectionError(_NO_HEAD)
        return bool(piece)


def _another(meeting: Meeting, name: str) -> AnotherJob:
    return AnotherJob(
        f"{meeting.endpoint} serves another job, {name[:_SHOWN_CHARACTERS]!r}, and this is {meeting.name!r}; choose a"
        f" free port for this one: --rdzv-endpoint {meeting.endpoint.host}:PORT"
    )


def _pair(line: str) -> tuple[str, str]:
    """Reads a pair of strings. Raises ConnectionError if the line is no answer of a head."""
    try:
        words = parse_json(line)
    except ValueError:
        words = None
    if not (isinstance(words, list) and len(words) == 2 and all(isinstance(word, str) for word in words)):
        raise ConnectionError(_NO_HEAD)
    return words[0], words[1]


def _fingerprint(token: str) -> str:
    return hashlib.sha256(f"elaunch: a token's fingerprint, 1: {token}".encode()).hexdigest()
