"""How the secret of a head's store reaches the nodes that the same scheduler started: by munge, or in a shared home.

The head seals it with munge, for its own user, and gives that to whoever connects to the port after the store's: to
others it means nothing. It also writes it to a file that only its user can read, for sites without munge.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elaunch.launcher.cluster.munge import MungeFailed, seal, unseal
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.head import listen
from elaunch.rendezvous.discovery import speaks_http
from elaunch.rendezvous.plan import Endpoint

# A credential lives for 300 s, unless the site says otherwise.
_SEALED_S = 60.0
_CALL_S = 2.0
_PAUSE_S = 0.2
# Until a waiting node says what it waits for; a shared disk may show a new file that much later.
_PATIENCE_S = 60.0
_BYTES_MAX = 64 << 10
# What a head that was killed has left: the secret of a store that is gone.
_OLD_S = 30 * 86_400.0

TOKEN_LINE = "export ELAUNCH_TOKEN=$(openssl rand -hex 16)"


@dataclass(frozen=True)
class Meeting:
    """Where a job's nodes meet: the endpoint, and a name that no other job of this user has, nor another life of it."""

    endpoint: Endpoint
    name: str

    @property
    def port(self) -> Endpoint:
        """Where the head gives its credential."""
        return Endpoint(self.endpoint.host, self.endpoint.port + 1)

    @property
    def file(self) -> Path:
        return Path("~/.elaunch").expanduser() / self.name.replace("/", "_")


class Offer:
    """The head's side, until `close`."""

    def __init__(self, meeting: Meeting, token: str) -> None:
        self._meeting = meeting
        self._token = token
        self._sealed: tuple[float, bytes] | None = None
        self._listener = _listener(meeting.port)
        if self._listener:
            threading.Thread(target=self._serve, args=(self._listener,), name="elaunch-handover", daemon=True).start()
        # Without a home that can be written, munge has to do.
        with suppress(OSError):
            _write(meeting.file, token)

    def close(self) -> None:
        if self._listener:
            # A thread in accept() is woken by this, and not by closing.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with suppress(OSError):
            self._meeting.file.unlink()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                asking, _ = listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return
            with asking, suppress(OSError):
                asking.settimeout(_CALL_S)
                asking.sendall(self._credential())

    def _credential(self) -> bytes:
        """The same for all who ask within a minute; empty where munge does not work here."""
        now_s = time.monotonic()
        if self._sealed is None or now_s - self._sealed[0] > _SEALED_S:
            try:
                self._sealed = (now_s, seal(self._token).encode())
            except MungeFailed:
                self._sealed = (now_s, b"")
        return self._sealed[1]


def fetch(meeting: Meeting, wait_s: float, say: Callable[[str], None]) -> str:
    """The head's token; empty where an etcd listens at the endpoint instead. Raises SiteError.

    Nothing that comes here is trusted further than it goes: a wrong token opens no store.
    """
    begun_s = time.monotonic()
    answered_s: float | None = None
    is_said = False
    trouble = f"nothing listens at {meeting.port} yet"
    while True:
        if _is_etcd(meeting.endpoint):
            return ""
        try:
            return unseal(_ask(meeting.port))
        except MungeFailed as error:
            trouble = f"munge does not work: {error}"
            answered_s = answered_s or time.monotonic()
        except OSError as error:
            trouble = f"{meeting.port}: {error.strerror or error}"
        if token := _read(meeting.file):
            return token
        now_s = time.monotonic()
        if now_s - begun_s > wait_s or (answered_s and now_s - answered_s > _PATIENCE_S):
            raise SiteError(
                f"the secret of the job's store did not come from {meeting.endpoint.host} ({trouble}, and no"
                f" {meeting.file} is seen here); give all nodes the same one, as in a job's script, before srun:"
                f" {TOKEN_LINE}"
            )
        if now_s - begun_s > _PATIENCE_S and not is_said:
            say(f"still waiting for {meeting.endpoint.host}: {trouble}, and no {meeting.file} is seen here")
            is_said = True
        time.sleep(_PAUSE_S)


def _listener(place: Endpoint) -> socket.socket | None:
    """None where the port is taken: the file has to do."""
    try:
        bound = listen(place)
    except UsageError:
        return None
    return bound.listener if bound else None


def _is_etcd(endpoint: Endpoint) -> bool:
    try:
        return speaks_http(endpoint, _CALL_S)
    except OSError:
        return False


def _ask(place: Endpoint) -> str:
    """What the head says to everybody. Raises OSError, and MungeFailed where it has nothing to say."""
    said = b""
    with socket.create_connection((place.host, place.port), _CALL_S) as stream:
        while len(said) < _BYTES_MAX and (piece := stream.recv(4096)):
            said += piece
    if not said:
        raise MungeFailed(f"{place.host} has none")
    return said.decode(errors="replace")


def _write(path: Path, token: str) -> None:
    """Whole or not at all, and readable by its owner alone from the first moment on."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    for old in path.parent.iterdir():
        if old.stat().st_mtime < time.time() - _OLD_S:
            old.unlink()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:  # noqa: PTH123
        file.write(token)
    draft.rename(path)


def _read(path: Path) -> str:
    """Its text, where it is this user's own and nobody else's to write; else nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(fd) as file:  # noqa: PTH123
        found = os.fstat(fd)
        return file.read().strip() if found.st_uid == os.geteuid() and not found.st_mode & 0o077 else ""
