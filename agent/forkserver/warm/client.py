"""An agent asks a warm fork server for a fork."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.warm.handover import Handover
from elaunch.agent.forkserver.warm.holders import holders
from elaunch.agent.forkserver.warm.interpreter import without_program
from elaunch.agent.forkserver.warm.place import (
    NoPlace,
    checked,
    folder,
    socket_path,
    why_it_could_not_stay,
)
from elaunch.agent.forkserver.wire import Boot
from elaunch.agent.linux import credentials, is_stopped
from elaunch.rendezvous.job_spec import Program, ProgramKind
from elaunch.rendezvous.texts import plain

# A server that still imports has begun before a cold start would: waiting for it is shorter.
_IMPORT_S = 10.0
# One that has imported answers in some milliseconds, unless the host has no CPU for it.
ANSWER_S = 2.0
# The fork looks at each file that is loaded, which may be on a slow network file system.
_CHECKS_S = 10.0
LOOK_S = 0.05
# Whoever waits longer than this for one that still imports is told so.
_SILENT_S = 0.3
_END_S = 1.0
_WAITS = "the fork server that the last job has left behind still imports; this start waits for it"


@dataclass(frozen=True)
class WarmKind:
    """Which warm fork server a job may use: one for these programs, with these modules."""

    program: Program
    preload: tuple[str, ...]


class Cold(Exception):
    """The job starts cold; the text says why, empty where no fork server is there.

    `is_outdated` says that a fork server that is there is of no use to the next job like this one. `packages` are
    those of that fork server, if the job's program needs more. `is_gone` says that there was none,
    or that it did not answer, `is_stuck` that it does not even take a connection.
    """

    def __init__(
        self,
        why: str,
        packages: tuple[str, ...] = (),
        *,
        is_outdated: bool = False,
        is_gone: bool = False,
        is_stuck: bool = False,
    ) -> None:
        super().__init__(why)
        self.is_outdated = is_outdated
        self.is_gone = is_gone
        self.is_stuck = is_stuck
        self.packages = packages


@dataclass(frozen=True)
class Origin:
    """A warm fork server: its pid, since when it is there (time.time), and its packages."""

    pid: int
    since: float
    packages: tuple[str, ...]


class Borrowed:
    """A job's fork server that a warm one has forked. It has the methods of a Popen that the agent uses.

    `origin` is the warm one.
    """

    def __init__(self, pid: int, pidfd: int, connection: socket.socket, origin: Origin) -> None:
        self.pid = pid
        self.origin = origin
        self._pidfd = pidfd
        self._connection = connection
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; -9 if the warm fork server has gone and cannot tell.

        Raises subprocess.TimeoutExpired.
        """
        if self._code is not None:
            return self._code
        gone, _, _ = select.select([self._pidfd], [], [], timeout)
        if not gone:
            raise subprocess.TimeoutExpired("elaunch: fork server", timeout or 0.0)
        self._code = -signal.SIGKILL
        with suppress(OSError):
            self._connection.settimeout(_END_S)
            packet = wire.receive(self._connection)
            if packet and packet[0].get("event") == "ended":
                self._code = int(packet[0]["code"])
        self._connection.close()
        os.close(self._pidfd)
        return self._code


def why_useless(program: Program, environment: Mapping[str, str]) -> str:
    """Why this program cannot start from a warm fork server, whatever is there; empty if it can."""
    if program.kind is ProgramKind.COMMAND:
        return "the program is a command, not Python"
    if program.is_on_stdin:
        return "the program is read from stdin"
    paths = environment.get("PYTHONPATH", "")
    if paths and not all(os.path.isabs(path) for path in paths.split(os.pathsep)):  # noqa: PTH117
        return "PYTHONPATH has an entry that depends on the current folder"
    return ""


def borrow(
    boot: Boot,
    environment: Mapping[str, str],
    control: socket.socket,
    idle_s: float,
    say: Callable[[str], None],
    meanwhile: Callable[[], None],
) -> Borrowed:
    """Have a warm fork server fork one for `boot`, whose end of the socket is `control`. Raises Cold.

    `say` is called with a sentence for the user if that takes time, `meanwhile` while the fork looks at its files.
    """
    kind = WarmKind(boot.program, boot.preload or ())
    with connected(_path(kind, environment)) as connection:
        if not select.select([connection], [], [], _SILENT_S)[0] and not is_stopped(credentials(connection)[0]):
            say(_WAITS)
        greeted(connection)
        fds: list[int] = []
        try:
            fds.append(Handover.of_this_process(boot, environment).memfd())
            fds.append(os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            wire.send(connection, {"op": "fork", "idle_s": idle_s}, (*fds, 2, control.fileno()))
        except OSError as error:
            raise Cold(f"the warm fork server could not be asked ({error.strerror})") from error
        finally:
            for fd in fds:
                os.close(fd)
        meanwhile()
        return _answered(connection)


def _path(kind: WarmKind, environment: Mapping[str, str]) -> Path:
    if why := why_useless(kind.program, environment):
        raise Cold(why)
    try:
        place = checked(folder(os.environ))
        if place is None:
            raise Cold("", is_gone=True)
        return socket_path(place, without_program(kind.program), kind.preload)
    except NoPlace as error:
        raise Cold(str(error)) from error


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """A connection to the server at `path`. It is closed unless it has been detached. Raises Cold."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            _connect(connection, path)
        except FileNotFoundError:
            raise Cold("", is_gone=True) from None
        except BlockingIOError:
            raise Cold(f"{_too_many(path)}; elaunch warm --stop ends it", is_stuck=True) from None
        except ConnectionRefusedError:
            why = why_it_could_not_stay(path)
            told = (
                f"the last fork server could not stay: {why}" if why else f"the warm fork server of {path} was killed"
            )
            raise Cold(told, is_gone=True) from None
        except OSError as error:
            raise Cold(f"{path} cannot be reached ({error.strerror})") from error
        pid, uid = credentials(connection)
        if uid != os.geteuid():
            raise Cold(f"{path} is a socket of the user with id {uid}; remove it")
        if pid == 0:
            raise Cold(f"{path} is a socket of another container, which shares this folder; end its fork server there")
        yield connection


def _connect(connection: socket.socket, path: Path) -> None:
    """Connect it. Raises OSError; BlockingIOError where the server does not answer those who came before."""
    # A connect that blocks would wait for ever.
    connection.setblocking(False)
    until_s = time.monotonic() + ANSWER_S
    while True:
        try:
            connection.connect(os.fspath(path))
            break
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(LOOK_S)
    connection.setblocking(True)


def _too_many(path: Path) -> str:
    pids = ", ".join(map(str, holders(path)))
    return f"the warm fork server{pids and f' (pid {pids})'} does not answer, and too many starts wait for it"


def _answered(connection: socket.socket) -> Borrowed:
    """The fork that was asked for. Raises Cold, and leaves no fork then."""
    pid, pidfd, origin = 0, -1, None
    until_s = time.monotonic() + ANSWER_S
    try:
        while not (pid and origin):
            said, fds = next_packet(connection, until_s)
            match said:
                case {"event": "forked", "pid": int(pid)} if fds:
                    pidfd = fds[0]
                    until_s += _CHECKS_S
                case {"event": "warm", "since": float(since), "server": int(server)}:
                    origin = Origin(server, since, _names(said.get("packages")))
                case {"event": "cold", "why": str(why), "outdated": bool(is_outdated)}:
                    raise Cold(plain(why), _names(said.get("packages")), is_outdated=is_outdated)
                case _:
                    raise Cold("the warm fork server ended, or said nothing that can be read", is_outdated=True)
        borrowed = Borrowed(pid, pidfd, connection.dup(), origin)
        pidfd = -1
        return borrowed
    finally:
        if pidfd >= 0:
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def greeted(connection: socket.socket) -> None:
    """Wait until the server is ready. Raises Cold.

    Nothing is sent before: as long as a server does not read them, the job's descriptors would stay open in the kernel.
    """
    said, _ = next_packet(connection, time.monotonic() + _IMPORT_S)
    match said:
        case {"event": "ready"}:
            return
        case {"event": "cold", "why": str(why)}:
            raise Cold(plain(why))
        case _:
            raise Cold("the warm fork server ended while it imported", is_gone=True)


def next_packet(connection: socket.socket, until_s: float) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The next packet; empty if there is none any more. Raises Cold if the server does not answer in time."""
    while not select.select([connection], [], [], LOOK_S)[0]:
        pid = credentials(connection)[0]
        if is_stopped(pid):
            raise Cold(f"the warm fork server (pid {pid}) is stopped; kill -CONT {pid}, or elaunch warm --stop")
        if time.monotonic() >= until_s:
            raise Cold("the warm fork server does not answer; elaunch warm --stop ends it", is_gone=True)
    return wire.receive(connection) or ({}, ())


def _names(said: object) -> tuple[str, ...]:
    return tuple(map(str, said)) if isinstance(said, list) else ()
