"""The agent's client of a fork server: its own (server.py), or a warm one that an earlier run left (warm.py)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.wire import PROCESS_NAME, SERVER_NAME, Boot
from elaunch.agent.linux import credentials, status, text_of
from elaunch.rendezvous.format import plain
from elaunch.rendezvous.types import Program

_ORDER_WAIT_S = 60.0
_STAYS_S = 5.0
# A server responds in milliseconds, unless it is stopped or the host has no CPU for it.
_HANDSHAKE_S = 2.0
# A server checks each file that is loaded, which may be on a slow network file system.
_CHECKS_S = 10.0
_REAPS_S = 1.0
# A server whose socket was closed, or that has exited, gets this long before SIGKILL.
_EXIT_S = 0.2
# Fields of /proc/self/status.
_STATUS = (
    "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Seccomp_filters", "CapInh", "CapPrm", "CapEff", "CapBnd",
    "CapAmb", "Cpus_allowed_list", "Mems_allowed_list", "THP_enabled", "Umask", "SigBlk", "SigIgn",
)  # fmt: skip
_FILES = ("cgroup", "personality", "coredump_filter", "timerslack_ns", "attr/current", "sessionid", "oom_score_adj")


Fds = tuple[int, ...]


class ForkServer:
    """The fork server of one agent: a process and the socket to it. `restart` replaces both.

    `packages` as in `Boot`. With `warm_s` a warm one that fits is used, and may be left behind again (`stay`), idle for
    at most that long. `is_warm`: an earlier run has started it; `how` is the log line about that, if any.
    Create it as early as possible: it imports while the agent does its own work. Orders that come before it is ready
    wait in the socket. `fileno` is readable when `receive` has an event.
    """

    def __init__(
        self,
        program: Program,
        preload: tuple[str, ...] | None,
        environment: Mapping[str, str],
        ignored: tuple[int, ...] = (),
        *,
        packages: tuple[str, ...] = (),
        warm_s: float = 0.0,
    ) -> None:
        self._program = program
        self._environment = environment
        self._ignored = ignored
        self.preload = preload
        self.packages = packages
        self.is_warm, self.how = False, ""
        self._warm_s = warm_s if preload is not None else 0.0
        self._has_imported = self._is_left = False
        # None for a warm server, which has another parent.
        self._process: subprocess.Popen[bytes] | None = None
        if not (self._warm_s and self._borrow()):
            self._start()

    def restart(self) -> None:
        """Start another fork server after `stop` or `lost`. It imports what `preload` names now. Raises OSError."""
        self._has_imported = self.is_warm = False
        self._start()

    def preload_nothing(self) -> None:
        """From the next `restart` on each worker is a fresh interpreter."""
        self.preload, self.packages = None, ()

    def _borrow(self) -> bool:
        """Hand this job to a warm fork server. Returns whether there is one that fits."""
        self._socket, theirs = wire.pair()
        with theirs:
            boot, path = self._boot(theirs), socket_path(self._program)
            try:
                checked(path.parent)
                with connected(path) as (connection, handshake), os.fdopen(boot.memfd()) as message:
                    since = float(handshake["since"])
                    try:
                        wire.send(connection, {"op": "take"}, (message.fileno(), 2, theirs.fileno()))
                    except OSError as error:
                        raise Cold("the warm fork server has exited") from error
                    _receive(connection, _CHECKS_S)
                    self.pid = credentials(connection)[0]
            except Cold as error:
                self.how = f"cold start: {error}" if str(error) else ""
                self._socket.close()
                return False
        clock = time.strftime("%H:%M", time.localtime(since))
        self.how = f"warm start: from the warm fork server left at {clock} (pid {self.pid})"
        self.is_warm = True
        self._socket.setblocking(False)
        return True

    def stay(self) -> str:
        """After the job: leave the server running for later runs if `warm_s` is set. Returns a log line, if any."""
        if not self._warm_s or not self.preload or not self._has_imported:
            return ""
        try:
            path = socket_path(self._program)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            checked(path.parent)
            stop(path)
            self._socket.settimeout(_STAYS_S)
            self._send({"op": "stay", "path": os.fspath(path), "idle_s": self._warm_s})
            while (event := self.receive()) and event["event"] != "left":
                pass
            why = event["why"] if event else "it has exited"
        except (Cold, OSError) as error:
            why = str(error)
        if why:
            return f"no warm fork server stays: {why}"
        self._is_left = True
        self._socket.close()
        if self.is_warm:
            return ""
        stays = f"a warm fork server stays for {self._warm_s / 60:g} min"
        return f"{stays}, so that the next start needs no import; elaunch warm --stop ends it"

    def _boot(self, control: socket.socket) -> Boot:
        own = facts(self._program, self._ignored) if self._warm_s else {}
        return Boot(
            os.getpid(),
            control.fileno(),
            self._program,
            self.preload,
            self._environment.get("PYTHONPATH"),
            self._ignored,
            packages=self.packages,
            facts=tuple(own.items()),
            environment=tuple(self._environment.items()) if self._warm_s else (),
        )

    def _start(self) -> None:
        self._socket, theirs = wire.pair()
        boot = self._boot(theirs)
        with theirs, os.fdopen(boot.memfd()) as message:
            command, environment = boot.command(self._environment, message.fileno())
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                # A sitecustomize or a preloaded module may print. On stderr no pipeline reads that as data.
                stdout=2,
                pass_fds=(message.fileno(), theirs.fileno()),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, generation: int, local_rank: int, env: dict[str, str], cpus: list[int] | None, fds: Fds) -> None:
        """Request a worker. `fds`: fds 0 to 2, its link (3), a crash file. Raises OSError if the server is gone."""
        self._send({"op": "worker", "generation": generation, "key": local_rank, "env": env, "cpus": cpus}, fds)

    def spawn_store(self, generation: int, host: str, port: int, fds: Fds) -> None:
        """Request a worker store. `fds` become its fds 0 to 4: 3 is the listening socket, 4 its control socket."""
        self._send({"op": "store", "generation": generation, "key": "store", "host": host, "port": port}, fds)

    def signal(
        self, generation: int, keys: Sequence[int], signum: int, *, group: bool, is_notice: bool = False
    ) -> None:
        """Signal those that still live, one right after the other, or their process groups.

        `keys` are local ranks. With `is_notice` only those with a handler get the signal, the others SIGTERM. A
        scheduler that gave its notice to the fork server too has given it to all processes: they do not get it again.
        """
        order = {"op": "signal", "keys": keys, "generation": generation, "signum": int(signum), "group": group}
        self._send(order | {"is_notice": is_notice})

    def _send(self, order: dict[str, Any], fds: Fds = ()) -> None:
        try:
            wire.send(self._socket, order, fds)
        except BlockingIOError:
            # While the fork server imports, the socket holds orders for about 90 workers. Then wait until it reads.
            select.select([], [self._socket], [], _ORDER_WAIT_S)
            wire.send(self._socket, order, fds)

    def receive(self) -> dict[str, Any] | None:
        """The next event, or None where the fork server has exited. Raises BlockingIOError where there is none."""
        packet = wire.receive(self._socket)
        if packet is None:
            return None
        event = packet[0]
        self._has_imported |= event["event"] == "ready" and not event["reason"]
        return event

    def stop(self) -> None:
        """End the fork server; the kernel then kills all its children. One that was left behind continues."""
        if self._is_left:
            return
        # It reaps its zombies first: in a container there may be no other process to do so.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_REAPS_S)
            while self._socket.recv(1 << 16):
                pass
        self._kill()
        self._socket.close()

    def lost(self) -> str:
        """How a lost fork server has exited."""
        self._socket.close()
        code = self._kill()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _kill(self) -> int:
        """Kill it if it does not exit on its own. Returns its exit code, SIGKILL's for a warm one."""
        if self._process:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            self._process.kill()
            return self._process.wait()
        if status(self.pid, "Name") == SERVER_NAME:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return -signal.SIGKILL


class Cold(Exception):
    """No warm fork server can be used; the text is the reason, empty where there is none."""


def facts(program: Program, ignored: tuple[int, ...]) -> dict[str, str]:
    """What children inherit from this process and a warm fork server could not give them, by name."""
    fields = dict(line.partition(":")[::2] for line in text_of("/proc/self/status").splitlines())
    limits = {line[:26].strip(): " ".join(line[26:].split()) for line in text_of("/proc/self/limits").splitlines()[1:]}
    here, root = os.stat("."), os.stat("/")  # noqa: PTH116
    return {
        "the program": " ".join(program.argv[: len(program.argv) - len(program.args)]),
        "elaunch": __file__,
        "the current folder": f"{here.st_dev}:{here.st_ino}",
        "the root folder": f"{root.st_dev}:{root.st_ino}",
        "the ignored signals": " ".join(map(str, ignored)),
        **{f"{field} in /proc/self/status": fields.get(field, "").strip() for field in _STATUS},
        **{f"the limit {limit}": value for limit, value in limits.items()},
        **{f"the {kind} namespace": os.readlink(f"/proc/self/ns/{kind}") for kind in os.listdir("/proc/self/ns")},  # noqa: PTH115, PTH208
        "the nice value": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "the scheduling policy": f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}",
        "the NUMA policy": " ".join(text_of("/proc/self/numa_maps").partition("\n")[0].split()[1:2]),
        **{file: text_of(f"/proc/self/{file}") for file in _FILES},
    }


def folder(environ: Mapping[str, str]) -> Path:
    """The user's folder for the sockets, which need not exist."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR", ""))
    # sudo and su may keep the variable, and a folder that root makes there would be closed to the user.
    with suppress(OSError):
        if runtime.is_absolute() and runtime.stat().st_uid == os.geteuid():
            return runtime / "elaunch_warm"
    return Path("/tmp", f"elaunch_warm_{os.geteuid()}")


def checked(place: Path) -> Path:
    """Return `place` if no other user can enter it. Raises Cold, without a reason if it does not exist."""
    try:
        found = place.lstat()
    except OSError:
        raise Cold("") from None
    if found.st_uid != os.geteuid():
        raise Cold(f"{place} belongs to the user with id {found.st_uid}; have it removed, or set XDG_RUNTIME_DIR")
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise Cold(f"{place} is not a folder only you can enter; remove it, or chmod 700 {place}")
    return place


def socket_path(program: Program) -> Path:
    """Where the fork server for this program, in this folder, listens."""
    # Containers may share the folder: a server of another one can be neither used nor ended.
    parts = (os.readlink("/proc/self/ns/pid"), os.getcwd(), program.interpreter, program.kind.value, program.target)  # noqa: PTH109, PTH115
    return folder(os.environ) / f"{crc32(json.dumps(parts).encode()):08x}"


@contextmanager
def connected(path: Path) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """A connection to the fork server at `path`, and its handshake. Raises Cold.

    The server sends first: while it does not read, the kernel would keep open the files of a job sent to it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_HANDSHAKE_S)
        try:
            connection.connect(os.fspath(path))
        except FileNotFoundError:
            raise Cold("") from None
        except ConnectionRefusedError:
            raise Cold(f"the warm fork server at {path} was killed") from None
        except OSError as error:
            raise Cold(f"{path} cannot be reached ({error.strerror or error})") from error
        if (uid := credentials(connection)[1]) != os.geteuid():
            raise Cold(f"{path} is a socket of the user with id {uid}; remove it")
        yield connection, _receive(connection, _HANDSHAKE_S)


def _receive(connection: socket.socket, timeout_s: float) -> dict[str, Any]:
    """The fork server's next packet. Raises Cold if none comes, or if it refuses the job."""
    connection.settimeout(timeout_s)
    try:
        packet = wire.receive(connection)
    except OSError as error:
        pid = credentials(connection)[0]
        raise Cold(f"the warm fork server (pid {pid}) does not respond; elaunch warm --stop ends it") from error
    if packet is None:
        raise Cold("the warm fork server has exited")
    if packet[0].get("event") == "cold":
        raise Cold(plain(str(packet[0].get("why"))))
    return packet[0]


def servers() -> list[Path]:
    """The sockets of this user's warm fork servers. Raises Cold."""
    return sorted(checked(folder(os.environ)).iterdir())


def stop(path: Path) -> bool:
    """Kill the fork server at `path`, and remove the socket. Returns whether one was there. Raises Cold."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        is_there = connection.connect_ex(os.fspath(path)) == 0
        pid, uid = credentials(connection) if is_there else (0, os.geteuid())
    if uid != os.geteuid() or (is_there and status(pid, "Name") != PROCESS_NAME):
        raise Cold(f"{path} is a socket of the process {pid} of the user with id {uid}; remove it")
    if is_there:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    path.unlink(missing_ok=True)
    return is_there
