"""How the secret of a head's store reaches the nodes that the same scheduler started: from a shared home, or by munge.

The head tells whoever connects to the port after the store's which job it serves, by what its token can be known, and
the token sealed with munge for its own user. So a node whose home has the same key knows that it has made the same
token, another node opens the seal, and to others all this means nothing.
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
from elaunch.launcher.store.head import listen
from elaunch.launcher.store.munge import MungeFailed, seal, unseal
from elaunch.rendezvous.codec import parse_json
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.discovery import speaks_http
from elaunch.rendezvous.http.client import Deadline
from elaunch.rendezvous.http.dial import dial
from elaunch.rendezvous.http.resolve import resolve

# A credential lives for 300 s, unless the site says otherwise.
_SEALED_S = 60.0
_CALL_S = 2.0
# For all that a head says, the look-up of its name included. The head may have to ask munge first.
_EXCHANGE_S = 5.0
_PAUSE_S, _PAUSE_MAX_S = 0.1, 2.0
# Until a waiting node says what it waits for; a shared disk may show a new file that much later.
_PATIENCE_S = 60.0
# A head offers the secret of its store at once.
_SETTLE_S = 5.0
# Far more than a head says, and still little memory.
_BYTES_MAX = 64 << 10
_SHOWN_CHARACTERS = 100

_NO_HEAD = "what listens there is no head of a job"


@dataclass(frozen=True)
class Meeting:
    """Where a job's nodes meet: the endpoint, and a name that no other job of this user has, nor another life of it.

    `may_be_etcd`: somebody typed the endpoint, and may mean an etcd.
    """

    endpoint: Endpoint
    name: str
    may_be_etcd: bool = False

    @property
    def port(self) -> Endpoint:
        """Where the head tells of its token: the next port; before the last there is another."""
        port = self.endpoint.port
        return Endpoint(self.endpoint.host, port + 1 if port < PORT_MAX else port - 1)


class AnotherJob(SiteError):
    """The head of another job is where this one's should be."""


class Offer:
    """The head's side, until `close`. Raises UsageError where its port cannot be had."""

    def __init__(self, meeting: Meeting, token: str) -> None:
        self._meeting = meeting
        self._token = token
        self._sealed: tuple[float, str] | None = None
        self._is_closed = threading.Event()
        bound = listen(meeting.port)
        if bound is None:
            raise taken(meeting.endpoint, meeting.port)
        self._listener = bound.listener
        threading.Thread(target=self._serve, name="elaunch-handover", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        # A thread in accept() is woken by this, and not by closing.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        hello = json.dumps([self._meeting.name, _fingerprint(self._token)])
        while not self._is_closed.is_set():
            try:
                asking, _ = self._listener.accept()
            except OSError:
                # As without a free descriptor: that passes.
                self._is_closed.wait(_PAUSE_S)
                continue
            with asking, suppress(OSError):
                # All of it fits into the kernel's buffer. So the head waits for no asker, and a slow one delays nobody.
                asking.setblocking(False)
                asking.sendall(f"{hello}\n".encode())
                asking.sendall(self._credential().encode())

    def _credential(self) -> str:
        """The same for all who ask within a minute; empty where munge does not work here, which may pass sooner."""
        now_s = time.monotonic()
        if self._sealed is None or now_s > self._sealed[0]:
            try:
                self._sealed = (now_s + _SEALED_S, seal(json.dumps([self._meeting.name, self._token])))
            except MungeFailed:
                self._sealed = (now_s + _SETTLE_S, "")
        return self._sealed[1]


def fetch(meeting: Meeting, wait_s: float, say: Callable[[str], None]) -> str:
    """The head's token; empty where an etcd listens at the endpoint instead. Raises SiteError.

    Nothing that comes here is trusted further than it goes: a wrong token opens no store. The caller
    tells the user that an etcd listens there.
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
            trouble = f"no key in ~/.elaunch here is the head's, and munge does not work: {error}"
        except OSError as error:
            trouble, patience_s = f"{meeting.port}: {error.strerror or error}", _SETTLE_S
            listens = _listens(meeting.endpoint)
        now_s = time.monotonic()
        listens_s = (listens_s or now_s) if listens else None
        if now_s - begun_s > wait_s or (listens_s and now_s - listens_s > patience_s):
            raise SiteError(
                f"the secret of the job's store did not come from {meeting.endpoint.host} ({trouble}); give all nodes"
                f" the same one, as in a job's script, before srun: {TOKEN_LINE}"
            )
        if now_s - begun_s > _PATIENCE_S and not is_said:
            say(f"still waiting for {meeting.endpoint.host}: {trouble}")
            is_said = True
        # Many nodes, one head: not all at the same moment.
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(1.5 * pause_s, _PAUSE_MAX_S)


def taken(endpoint: Endpoint, port: Endpoint) -> SiteError:
    """What a head says that finds one of its two ports taken."""
    return SiteError(
        f"port {port.port}, at which this node was to serve the job's store, is taken by another program;"
        f" choose a free one, with the next: --rdzv-endpoint {endpoint.host}:PORT"
    )


def _is_etcd(endpoint: Endpoint) -> bool:
    """Whether what listens there speaks without TLS."""
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
    """The token. Raises AnotherJob, OSError, and MungeFailed where the head has said nothing that helps here."""
    place, deadline = meeting.port, Deadline(_EXCHANGE_S)
    with _connected(place, deadline) as stream:
        words = _Words(stream, deadline)
        name, fingerprint = _pair(words.line())
        if name != meeting.name:
            raise _another(meeting, name)
        token = token_at_home(name)
        if token and hmac.compare_digest(_fingerprint(token).encode(), fingerprint.encode(errors="replace")):
            return token
        credential = words.rest()
    if not credential:
        raise MungeFailed(f"{place.host} has none")
    # Whoever sits at the port can pass on what another job's head has told him.
    name, token = _pair(unseal(credential))
    if name != meeting.name:
        raise _another(meeting, name)
    return token


class _Words:
    """Reads what a head says, until `deadline` at the latest, however slowly it comes. Raises OSError."""

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
        """Read some more; False at the end."""
        try:
            self._stream.settimeout(self._deadline.left())
            piece = self._stream.recv(_BYTES_MAX)
        except TimeoutError:
            raise TimeoutError(f"what listens there did not say all within {self._deadline}") from None
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
    """Raises ConnectionError for what no head says."""
    try:
        words = parse_json(line)
    except ValueError:
        words = None
    if not (isinstance(words, list) and len(words) == 2 and all(isinstance(word, str) for word in words)):
        raise ConnectionError(_NO_HEAD)
    return words[0], words[1]


def _fingerprint(token: str) -> str:
    return hashlib.sha256(f"elaunch: a token's fingerprint, 1: {token}".encode()).hexdigest()
