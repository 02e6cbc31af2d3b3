"""The warm fork server: it outlives its job, and serves the next run of the same program.

Only a run whose own fork server would be identical may use it: see `_unfit`. It exits at the first run that does not
fit, whose fork server may stay in its place.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from elaunch.agent.environment import RANK_VARIABLES
from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.preload import libraries, restore_environment, shadows
from elaunch.agent.forkserver.wire import PROCESS_NAME, SERVER_NAME, Boot
from elaunch.agent.guardian.guardian import VARIABLE
from elaunch.agent.linux import credentials, outlive_parent, set_command_line, signal_fd, stat_fields

# A client that connects and does not send its request blocks the server no longer than this.
_REQUEST_S = 2.0
_BACKLOG = 64
_POLL_S = 30.0
# File timestamps lag behind the kernel's clock by a tick, and a few modules were imported earlier.
_MARGIN_NS = 100_000_000
# Entries by which installers record packages.
_RECORDS = (".dist-info", ".egg-info", ".egg-link", ".pth")
# Variables that may differ: the shell's own, those that each worker gets, and those that are read when they are used.
_FREE = RANK_VARIABLES | {VARIABLE, "_", "OLDPWD", "PWD", "SHLVL", "CUDA_VISIBLE_DEVICES"}
_FREE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


class Imports:
    """The files that the imports of this process depend on. Create it before the imports, call `finish` after them.

    Python reads the program's own file, `target`, only in a worker.
    """

    def __init__(self, target: str) -> None:
        self._target = os.path.abspath(target)  # noqa: PTH100
        self._began_ns = time.time_ns() - _MARGIN_NS
        self.modules: Mapping[str, ModuleType] = {}

    def finish(self) -> None:
        """Record the state of all files of modules and libraries."""
        self.modules = dict(sys.modules)
        self._names = {name.partition(".")[0] for name in self.modules}
        # A lazy module may import more at the lookup of an attribute that it lacks.
        files = {getattr(module, "__dict__", {}).get("__file__") for module in self.modules.values()}
        paths = {*libraries(), *sys.path, *(file for file in files if isinstance(file, str))}
        paths |= {os.fspath(file) for folder in sys.path for file in Path(folder).glob("*.pth")}
        paths.add(os.path.join(sys.prefix, "pyvenv.cfg"))  # noqa: PTH118
        self._known = {path: self._state(path) for path in paths - {self._target}}

    def change(self) -> str:
        """A sentence on a file that has changed since the imports began, or was added or removed; empty without one."""
        for path, known in self._known.items():
            # The ctime alone changes too when another environment gets a hard link to the file, as uv makes them.
            if isinstance(known, tuple) and known[-1] >= self._began_ns:
                return f"{path} was written while it was imported"
            state = self._state(path)
            if state != known and not (isinstance(state, tuple) and known and state[:-1] == known[:-1]):
                return f"{path} has changed"
        return ""

    def _state(self, path: str) -> tuple[int, ...] | list[str] | None:
        """Of a folder, the entries that affect imports; of a file, its mtime, size, inode and ctime."""
        with suppress(OSError, ValueError):
            if os.path.isdir(path):  # noqa: PTH112
                # Not its mtime: editors and Python's caches change that.
                entries = os.listdir(path)  # noqa: PTH208
                return sorted(e for e in entries if e.endswith(_RECORDS) or e.partition(".")[0] in self._names)
            status = os.stat(path)  # noqa: PTH116
            return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns
        return None


class WarmServer:
    """The fork server in this process, between two jobs. `boot` is the last one's."""

    def __init__(self, boot: Boot, imports: Imports, loaded_at_start: Collection[str]) -> None:
        self._boot = boot
        self._imports = imports
        self._loaded_at_start = loaded_at_start
        self._since = time.time()

    def stay(self, order: Mapping[str, Any], control: socket.socket) -> None:
        """Release the job, listen at the order's path, and respond to the agent. Exits if that fails."""
        try:
            if why := self._imports.change():
                raise OSError(0, why)
            outlive_parent()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.close(null)
            # Else the job's guardian kills this process.
            _mark("-" * len(dict(self._boot.environment)[VARIABLE]))
            set_command_line(("elaunch: warm fork server",), PROCESS_NAME)
            # The OOM killer's first choice.
            Path("/proc/self/oom_score_adj").write_text("1000")
            self._listen(Path(order["path"]), order["idle_s"])
        except OSError as error:
            wire.send(control, {"event": "left", "why": error.strerror})
            os._exit(1)
        with control:
            wire.send(control, {"event": "left", "why": ""})

    def _listen(self, path: Path, idle_s: float) -> None:
        own = path.with_suffix(f".{os.getpid()}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(os.fspath(own))
            own.chmod(0o600)
            self._listener.listen(_BACKLOG)
            own.rename(path)
        except OSError:
            own.unlink(missing_ok=True)
            raise
        self._path, self._inode = path, path.stat().st_ino
        self._until_s = time.monotonic() + idle_s
        self._signals = signal_fd((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))

    def serve(self) -> tuple[Boot, socket.socket]:
        """Wait for the next job. Returns it, and the socket to its agent. Exits if none that fits comes in time."""
        while True:
            left_s = max(self._until_s - time.monotonic(), 0.0)
            listener = self._listener.fileno()
            ready, _, _ = select.select([listener, self._signals], [], [], min(_POLL_S, left_s))
            if listener in ready and (job := self._accept()):
                return job
            if self._signals in ready or time.monotonic() >= self._until_s or not self._has_socket():
                self._exit()

    def _accept(self) -> tuple[Boot, socket.socket] | None:
        """Respond to a client. Returns its job if it has one."""
        # If the client has exited, or has another version, the end of the connection is the response.
        with suppress(OSError, ValueError):
            connection, _ = self._listener.accept()
            with connection:
                if credentials(connection)[1] != os.geteuid():
                    wire.send(connection, {"event": "cold", "why": "it belongs to another user"})
                    return None
                connection.settimeout(_REQUEST_S)
                wire.send(connection, self._handshake())
                _, fds = wire.receive(connection) or ({}, ())
                if len(fds) == 3:
                    job = Boot.read(fds[0])
                    if why := self._unfit(job):
                        # The next run will be the same, and not fit either.
                        wire.send(connection, {"event": "cold", "why": why})
                        self._exit()
                    try:
                        agent = self._take(job, *fds[1:])
                    except OSError:
                        self._exit()
                    wire.send(connection, {"event": "taken"})
                    return self._boot, agent
        return None

    def _handshake(self) -> dict[str, Any]:
        return {
            "event": "ready",
            "pid": os.getpid(),
            "since": self._since,
            "seconds_left": round(self._until_s - time.monotonic(), 1),
            "python": sys.executable,
            "program": self._boot.program.target,
            "folder": os.getcwd(),  # noqa: PTH109
            "packages": [*(self._boot.preload or ()), *self._boot.packages],
        }

    def _unfit(self, job: Boot) -> str:
        """Why that job must not use this fork server; empty if it may."""
        then, now = dict(self._boot.facts), dict(job.facts)
        for what in [what for what in now if now[what] != then.get(what)]:
            return f"{what} is {now[what]!r:.60}, and was {then.get(what)!r:.60}"
        then, now = dict(self._boot.environment), dict(job.environment)
        for name in sorted({*then, *now} - _FREE):
            if then.get(name) != now.get(name) and not name.startswith(_FREE_PREFIXES):
                # Its value may be a secret.
                return f"the variable {name} {'has another value' if name in now else 'is no longer set'}"
        if why := self._imports.change():
            return why
        if shadow := next(shadows(job.program, self._loaded_at_start, self._imports.modules), None):
            return f"{shadow} has the name of a module that is loaded"
        has = {*(self._boot.preload or ()), *self._boot.packages}
        missing = [name for name in (*(job.preload or ()), *job.packages) if name not in has]
        # What cannot be preloaded is no reason to refuse.
        if missing and not self._boot.left_out:
            return f"{job.program.target} imports {missing[0].replace(':', '.')}, which is not loaded"
        return ""

    def _take(self, job: Boot, stderr: int, control: int) -> socket.socket:
        """Apply the job's own settings to this process. Returns the socket to its agent."""
        # Other runs start cold from here on.
        self._path.unlink(missing_ok=True)
        self._listener.close()
        os.close(self._signals)
        for fd in (1, 2):
            os.dup2(stderr, fd)
        os.close(stderr)
        then, now = dict(self._boot.environment), dict(job.environment)
        Path("/proc/self/oom_score_adj").write_text(dict(job.facts)["oom_score_adj"])
        restore_environment({name: now.get(name) for name in {*then, *now} if then.get(name) != now.get(name)})
        _mark(now[VARIABLE])
        set_command_line(("elaunch: fork server",), SERVER_NAME)
        sys.argv[1:] = job.program.args
        sys.orig_argv[:] = job.program.argv
        self._boot = replace(self._boot, agent_pid=job.agent_pid, program=job.program, environment=job.environment)
        return socket.socket(fileno=control)

    def _has_socket(self) -> bool:
        """Whether the socket has not been removed, and no other fork server has taken its place."""
        with suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    def _exit(self) -> NoReturn:
        if self._has_socket():
            self._path.unlink(missing_ok=True)
        os._exit(0)


def _mark(marker: str) -> None:
    """Write the marker over the one in the process's initial environment, by which a guardian finds it.

    Raises OSError where it has another length.
    """
    start, end = (int(field) for field in stat_fields("self")[47:49])
    before, found, _ = ctypes.string_at(start, end - start).partition(f"{VARIABLE}=".encode())
    at = start + len(before) + len(found)
    if not found or len(ctypes.string_at(at)) != len(marker):
        raise OSError(0, "there is no room for the job's marker")
    ctypes.memmove(at, marker.encode(), len(marker))
