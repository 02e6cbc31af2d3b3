"""How the token of a head's store reaches the other nodes of its user.

A token that elaunch made is in a file of `~/.elaunch/stores` as long as its store lives, for nodes with the same home.
Nodes that a scheduler started get it from the head: it listens on the port after the store's, and sends every client
the name of its job, a fingerprint of its token, and the token in a munge credential that only the same user can open. A
node whose home has the same key (`~/.elaunch/key`) derives the same token, and recognises it by the fingerprint.
Another node opens the credential. Nobody else can use these responses.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.guardian.guardian import boot_id
from elaunch.launcher.errors import SiteError
from elaunch.launcher.options.files import FOLDER, TOKEN_LINE, private_folder, read_own
from elaunch.launcher.options.values import PORT_MAX
from elaunch.rendezvous.endpoint import Endpoint, is_meant_locally
from elaunch.rendezvous.etcd.discovery import speaks_http
from elaunch.rendezvous.http.dial import Deadline, dial, resolve
from elaunch.rendezvous.secret import Secret, fingerprint
from elaunch.strict_json import parse_json

STORES = f"{FOLDER}/stores"

_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_BYTES_MAX = 4096
_KEY_BYTES = 32
_TRIES = 5
# Much more than a head sends, and still little memory.
_RESPONSE_BYTES_MAX = 64 << 10
_MUNGE_S = 10.0
# unmunge's exit code for a credential that was read on this host before. Its text is still good.
_REPLAYED = 17
# A credential is made again after this time. munge's own limit is 300 s, unless the site changes it.
_SEALED_S = 60.0
# After a failure of munge the head tries again.
_SEAL_AGAIN_S = 5.0
_CALL_S = 2.0
# The limit for the whole response of a head, with the look-up of its name. The head may have to call munge first.
_EXCHANGE_S = 5.0
_PAUSE_S, _PAUSE_MAX_S = 0.1, 2.0
# A node that waits longer tells the user why. A shared disk may show a new file that much later.
_PATIENCE_S = 60.0
# The port of a head's store listens before the process of that store runs, which may take 30 s, and the head offers its
# token after that.
_OFFERED_S = 35.0
_SHOWN_CHARACTERS = 100

_NO_HEAD = "the program that listens there is no head of a job"


class KeptToken:
    """The file of one token. Its name is the fingerprint of the certificate that a store shows to every client.

    So a client finds the file however the endpoint is spelled, and a file that was left behind cannot affect another
    store. The file exists before the store answers any client, and is removed when the store ends.
    """

    def __init__(self, token: str, endpoint: Endpoint) -> None:
        """Raises OSError if this user has no home, or nothing can be written there."""
        name = fingerprint(Secret(token).der)
        text = f"{token}\n# at {endpoint}\n# {_here()}\n# of elaunch's process {os.getpid()}, which removes it\n"
        _retried(lambda: _write(name, text))
        self.path = str(Path(STORES).expanduser() / name)

    def remove(self) -> None:
        _remove(Path(self.path))


class KeptTokens:
    """The kept tokens of this user. Files that another user could have written are ignored."""

    def token_for(self, certificate: bytes) -> str:
        """The token that a certificate (DER) was made from, or empty."""
        with suppress(OSError), private_folder(STORES) as folder:
            return _lines(fingerprint(certificate), folder)[0]
        return ""

    def place_of(self, endpoint: Endpoint) -> str:
        """The file of a store that this user's elaunch serves at `endpoint`, or empty.

        A loopback address names a different endpoint on each host, and in each container.
        """
        wanted = {f"# at {endpoint}", *([f"# {_here()}"] if is_meant_locally(endpoint.host) else [])}
        with suppress(OSError), private_folder(STORES) as folder:
            for name in _names(folder):
                with suppress(OSError):
                    if wanted <= {*_lines(name, folder)}:
                        return f"{STORES}/{name}"
        return ""


@contextmanager
def token_removed_at_exit() -> Iterator[None]:
    """For the store's process: read a path from the first line on stdin, and remove that file at the end.

    The file is removed even if the agent is killed.
    """
    path = b""
    # Byte by byte: the server reads the next line.
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        path += byte
    try:
        yield
    finally:
        if path:
            _remove(Path(os.fsdecode(path)))


def _retried(write: Callable[[], None]) -> None:
    """Call `write` again if another agent has removed the empty folder just as it was to be used. Raises OSError."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            write()
            return
    write()


def _write(name: str, text: str) -> None:
    """Write a new file, which gets its name when it is whole. Raises OSError."""
    draft = secrets.token_hex(16)
    with private_folder(STORES, make=True) as folder:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            os.write(fd, text.encode())
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise
        finally:
            os.close(fd)


def _remove(file: Path) -> None:
    """Remove a token's file, and its folders if they are empty."""
    with suppress(OSError):
        file.unlink(missing_ok=True)
        file.parent.rmdir()
        file.parent.parent.rmdir()


def _names(folder: int) -> list[str]:
    return [name for name in os.listdir(folder) if _NAME.fullmatch(name)]


def _lines(name: str, folder: int) -> list[str]:
    return read_own(name, _FILE_BYTES_MAX, folder).decode(errors="replace").splitlines() or [""]


def _here() -> str:
    """This host's boot and network namespace: processes in the same one share a loopback address."""
    return f"boot {boot_id().decode().strip()}, network {Path('/proc/self/ns/net').readlink()}"


def token_at_home(name: str, *, make: bool = False) -> str:
    """The token of the job of that name, from this user's key; empty without a key. With `make`, make a missing key.

    The key is made once and stays. No job leaves a token of its own in the home, which another job could find.
    """
    try:
        path = Path(FOLDER, "key").expanduser()
        if make:
            _retried(lambda: _make_key(path))
        key = read_own(path, _KEY_BYTES + 1)
    except (OSError, RuntimeError):
        # RuntimeError: this user has no home.
        return ""
    return hmac.digest(key, name.encode(), "sha256").hex()[:32] if len(key) == _KEY_BYTES else ""


def _make_key(path: Path) -> None:
    """Make the key file whole or not at all. If several agents make it, the first one's stays."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=path.parent) as draft:
        draft.write(secrets.token_bytes(_KEY_BYTES))
        draft.flush()
        os.fsync(draft.fileno())
        os.link(draft.name, path)


class MungeFailed(Exception):
    """munge, the authentication service of a cluster, is not installed, or it refuses. The message says why."""


def seal(text: str) -> str:
    """`text` as a credential, which only this user can open, on any host with the same munge key, for some minutes.

    Raises MungeFailed.
    """
    # Through stdin: every user can read a command line.
    return _munge(["munge", "--restrict-uid", str(os.geteuid())], text).strip()


def unseal(credential: str) -> str:
    """The text in a credential that this user has made. Raises MungeFailed."""
    output = _munge(["unmunge", "--keys", "STATUS,UID"], credential, (0, _REPLAYED))
    head, _, text = output.partition("\n\n")
    maker = re.search(r"^UID:.*\((\d+)\)$", head, re.MULTILINE)
    if not maker or int(maker[1]) != os.geteuid():
        raise MungeFailed("the credential belongs to another user")
    return text


def _munge(command: list[str], text: str, codes: tuple[int, ...] = (0,)) -> str:
    if shutil.which(command[0]) is None:
        raise MungeFailed(f"no {command[0]} on the PATH")
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_MUNGE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MungeFailed(f"{command[0]}: {error}") from None
    if done.returncode not in codes:
        raise MungeFailed(done.stderr.strip() or f"{command[0]} exited with {done.returncode}")
    return done.stdout


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
    """The head's side of the handover, until `close`. `listener` listens at the meeting's port."""

    def __init__(self, meeting: Meeting, token: str, listener: socket.socket) -> None:
        self._meeting = meeting
        self._token = token
        self._listener = listener
        self._sealed: tuple[float, str] | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._serve, name="elaunch-handover", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        # `shutdown` wakes a thread in accept(). `close` alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        hello = json.dumps([self._meeting.name, _token_fingerprint(self._token)])
        while not self._is_closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                # For example no free descriptor: that passes.
                self._is_closed.wait(_PAUSE_S)
                continue
            with client, suppress(OSError):
                # The response fits into the kernel's buffer, so a slow client does not delay the head.
                client.setblocking(False)
                client.sendall(f"{hello}\n{self._credential()}".encode())

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
        patience_s, listens = _PATIENCE_S, True
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
    deadline = Deadline(_EXCHANGE_S)
    with _connected(meeting.port, deadline) as stream:
        hello, _, credential = _read_whole(stream, deadline).partition("\n")
    name, told = _pair(hello)
    _check_name(meeting, name)
    token = token_at_home(name)
    if token and hmac.compare_digest(_token_fingerprint(token).encode(), told.encode(errors="replace")):
        return token
    if not credential:
        raise MungeFailed(f"{meeting.port.host} sent no credential")
    name, token = _pair(unseal(credential))
    # A stranger at the port could pass on the credential of another job's head.
    _check_name(meeting, name)
    return token


def _read_whole(stream: socket.socket, deadline: Deadline) -> str:
    """A head's response. Raises OSError, also if it comes too slowly."""
    received = b""
    try:
        while len(received) <= _RESPONSE_BYTES_MAX:
            stream.settimeout(deadline.left())
            piece = stream.recv(_RESPONSE_BYTES_MAX)
            if not piece:
                return received.decode(errors="replace")
            received += piece
    except TimeoutError:
        raise TimeoutError(f"the program that listens there gave no whole answer within {deadline}") from None
    raise ConnectionError(_NO_HEAD)


def _check_name(meeting: Meeting, name: str) -> None:
    if name != meeting.name:
        raise AnotherJob(
            f"{meeting.endpoint} serves another job, {name[:_SHOWN_CHARACTERS]!r}, and this is {meeting.name!r}; choose"
            f" a free port for this one: --rdzv-endpoint {meeting.endpoint.host}:PORT"
        )


def _pair(line: str) -> tuple[str, str]:
    """Reads a pair of strings. Raises ConnectionError if the line is no response of a head."""
    with suppress(ValueError):
        match parse_json(line):
            case [str(first), str(second)]:
                return first, second
    raise ConnectionError(_NO_HEAD)


def _token_fingerprint(token: str) -> str:
    return hashlib.sha256(f"elaunch: a token's fingerprint, 1: {token}".encode()).hexdigest()
