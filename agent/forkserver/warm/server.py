"""The warm fork server: it has imported, belongs to no job, and forks a fork server for each job that asks.

It listens on a Unix socket. One packet asks for a fork or for its state. It only accepts, forks and reaps:
whatever may take long, or may fail for one job, happens in the fork (`fitness`, `adopting`).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.child import take_fds
from elaunch.agent.forkserver.preload import Preloaded
from elaunch.agent.forkserver.warm import adopting
from elaunch.agent.forkserver.warm.files import Loaded, libraries, names_in
from elaunch.agent.forkserver.warm.first_environment import at_start, forget
from elaunch.agent.forkserver.warm.fitness import Known, Unfit, misfit
from elaunch.agent.forkserver.warm.folder import keepers, move
from elaunch.agent.forkserver.warm.handover import Handover
from elaunch.agent.forkserver.warm.interpreter import places, set_program
from elaunch.agent.forkserver.warm.variables import Read, of_no_use
from elaunch.agent.forkserver.wire import Boot
from elaunch.agent.linux import credentials

# Connections that have not asked yet. The oldest goes when another one comes.
_WAITING_MAX = 64
_LOOK_S = 30.0
_LOCALE = "LC_CTYPE"
# Below this share of the host's memory that is free, the server ends.
_FREE_MIN = 0.05
# What comes with an order: a Handover, the job's folder, stdin, stderr, and the fork server's end of its socket.
_FDS = 5
# In the fork, after the standard streams: the socket to the agent, and the connection on which it asked.
_CONTROL_FD, _ANSWER_FD = 3, 4


@dataclass(frozen=True)
class Taken:
    """What a fork has taken over: it goes on as the fork server of that job."""

    boot: Boot
    control: socket.socket
    mask: tuple[int, ...]
    preloaded: Preloaded


class WarmServer:
    """The server in this process, which has preloaded. `began_ns` is the time before its imports (time.time_ns).

    `environment` is from before them too. `modules` are all that are loaded, `opened` the files that they have read.
    Raises Unknown and ChangedMeanwhile.
    """

    def __init__(
        self,
        boot: Boot,
        listener: socket.socket,
        preloaded: Preloaded,
        environment: Mapping[str, str],
        modules: Mapping[str, ModuleType],
        loaded_at_start: Collection[str],
        opened: Collection[str],
        began_ns: int,
    ) -> None:
        self._boot = boot
        self._listener = listener
        self._preloaded = preloaded
        self._places = places(boot.program)
        # In a C locale Python changes this variable when it starts (PEP 538), in a fresh interpreter too.
        pythons = {_LOCALE: environment[_LOCALE]} if environment.get(_LOCALE) != at_start(_LOCALE) else {}
        self._customised = {**pythons, **preloaded.customised}
        if pythons:
            given = at_start(_LOCALE)
            environment = {name: value for name, value in environment.items() if name != _LOCALE}
            environment |= {} if given is None else {_LOCALE: given}
        in_folder = frozenset(path for path in opened if not os.path.isabs(path))  # noqa: PTH117
        loaded = Loaded.now(modules, {*opened} - in_folder)
        read = Read(preloaded.looked_up, frozenset(names_in(libraries())), loaded.pth, "tqdm" in modules)
        # Such as the credentials of the job that has left this process behind.
        useless = of_no_use({*environment, *os.environ}, read)
        forget(useless)
        kept = {name: value for name, value in environment.items() if name not in useless}
        here = os.getcwd()  # noqa: PTH109
        self._known = Known(
            here,
            kept,
            modules,
            read,
            loaded,
            in_folder,
            loaded_at_start,
            boot.packages,
            boot.sharers,
        )
        if file := self._known.loaded.newer_than(began_ns):
            raise ChangedMeanwhile(file)
        self._since = time.time()
        self._idle_since_s = time.monotonic()
        self._idle_s = boot.warm_s
        self._selector = selectors.DefaultSelector()
        self._waiting: list[socket.socket] = []
        self._jobs: dict[int, socket.socket] = {}
        self._path = Path(listener.getsockname())
        self._inode = self._path.stat().st_ino

    def serve(self) -> Taken:
        """Answer until it is time to end, then exit. Returns only in a fork, which has become a job's fork server."""
        self._listener.setblocking(False)
        adopting.yield_to_others()
        wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(wake_r, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_LOOK_S if self._jobs else min(_LOOK_S, max(self._left_s, 0.0))):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == wake_r:
                    os.read(wake_r, 4096)
                elif isinstance(key.fileobj, socket.socket) and (taken := self._read(key.fileobj)):
                    return taken
            self._reap()
            if (self._left_s <= 0 and not self._jobs) or _is_memory_short():
                self._end()

    @property
    def _left_s(self) -> float:
        return self._idle_since_s + self._idle_s - time.monotonic()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        uid = credentials(connection)[1]
        if uid != os.geteuid():
            _answer(connection, {"event": "cold", "why": f"it is not for the user with id {uid}", "outdated": False})
            connection.close()
            return
        while len(self._waiting) >= _WAITING_MAX:
            self._forget(self._waiting[0])
        _answer(connection, {"event": "ready"})
        connection.setblocking(False)
        self._waiting.append(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        if connection in self._waiting:
            self._waiting.remove(connection)
        connection.close()

    def _read(self, connection: socket.socket) -> Taken | None:
        try:
            packet = wire.receive(connection)
        except BlockingIOError:
            return None
        order, fds = packet or ({}, ())
        taken = None
        match order:
            case {"op": "fork", "idle_s": float(idle_s)} if len(fds) == _FDS:
                self._idle_s = idle_s
                taken = self._fork(connection, fds)
            case {"op": "state"}:
                _answer(connection, self._state())
                self._forget(connection)
            case _:
                self._forget(connection)
        if taken is None:
            for fd in fds:
                os.close(fd)
        return taken

    def _fork(self, connection: socket.socket, fds: tuple[int, ...]) -> Taken | None:
        # They would end a fork that has not taken over its job's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            why = f"no process can be made ({error.strerror})"
            _answer(connection, {"event": "cold", "why": why, "outdated": False})
        if pid == 0:
            return self._become(connection, fds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        if pid < 0:
            self._forget(connection)
            return None
        self._selector.unregister(connection)
        self._waiting.remove(connection)
        self._jobs[pid] = connection
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                wire.send(connection, {"event": "forked", "pid": pid}, (pidfd,))
            finally:
                os.close(pidfd)
        return None

    def _become(self, connection: socket.socket, fds: tuple[int, ...]) -> Taken:
        """In the fork: be the job's fork server. Ends the process if the job must start cold."""
        try:
            handover = Handover.read(fds[0])
            folder = fds[1]
            # The checks look for files beside the program.
            os.fchdir(folder)
            if found := misfit(self._known, handover):
                self._refuse(connection, found)
            adopting.adopt(handover, folder, self._customised)
            for name in keepers(self._known.modules, self._known.folder):
                move(self._known.modules[name], self._known.folder, os.getcwd())  # noqa: PTH109
            set_program(handover.boot.program, self._places)
            signal.set_wakeup_fd(-1)
            self._selector.close()
            answer_fd = connection.fileno()
            for each in (self._listener, *self._waiting, *self._jobs.values()):
                # A socket object would close a descriptor that is somebody else's by then.
                each.detach()
            stdin, stderr, control_fd = fds[2:]
            take_fds((stdin, stderr, stderr, control_fd, answer_fd))
            with socket.socket(fileno=_ANSWER_FD) as answer:
                warm = {"event": "warm", "since": self._since, "server": os.getppid(), "packages": self._boot.packages}
                wire.send(answer, warm)
        except Exception as error:
            _answer(connection, {"event": "cold", "why": f"{type(error).__name__}: {error}", "outdated": True})
            os._exit(1)
        boot = replace(handover.boot, control_fd=_CONTROL_FD, left_out=self._boot.left_out)
        preloaded = replace(self._preloaded, restore={})
        control = socket.socket(fileno=_CONTROL_FD)
        control.set_inheritable(False)
        return Taken(boot, control, handover.blocked, preloaded)

    def _refuse(self, connection: socket.socket, found: Unfit) -> None:
        said: dict[str, Any] = {"event": "cold", "why": found.why, "outdated": found.is_outdated}
        if found.lacks:
            said["packages"] = self._boot.packages
        _answer(connection, said)
        os._exit(0)

    def _reap(self) -> None:
        while self._jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._jobs.pop(pid, None)
            if connection:
                _answer(connection, {"event": "ended", "code": os.waitstatus_to_exitcode(status)})
                connection.close()
                self._idle_since_s = time.monotonic()

    def _state(self) -> dict[str, Any]:
        packages = {name.partition(".")[0] for name in self._preloaded.hidden}
        return {
            "event": "state",
            "pid": os.getpid(),
            "since": self._since,
            "left_s": None if self._jobs else round(self._left_s, 1),
            "jobs": len(self._jobs),
            "python": sys.executable,
            "program": self._boot.program.kind.value,
            "packages": sorted(packages),
        }

    def _end(self) -> None:
        with suppress(OSError):
            # Another one may have taken its place.
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        os._exit(0)


class ChangedMeanwhile(Exception):
    """A file was written while it was imported: what is loaded may be the old text."""


# `kill PID` ends the server. In its forks they are blocked, as in every fork server.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _answer(connection: socket.socket, said: dict[str, Any]) -> None:
    # The process that asked may be gone, or may not read.
    with suppress(OSError):
        wire.send(connection, said)


def _is_memory_short() -> bool:
    with suppress(OSError):
        return is_short(Path("/proc/meminfo").read_text())
    return False


def is_short(meminfo: str) -> bool:
    """Whether that text of /proc/meminfo tells of too little memory for a process that is there only for speed."""
    sizes = {words[0]: int(words[1]) for line in meminfo.splitlines() if len(words := line.split()) > 1}
    return sizes.get("MemAvailable:", sizes.get("MemTotal:", 0)) < _FREE_MIN * sizes.get("MemTotal:", 0)
