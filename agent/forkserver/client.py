"""The agent's end of the fork server (see server.py)."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elaunch.agent.forkserver import wire
from elaunch.agent.linux import is_stopped
from elaunch.rendezvous.job_spec import Program

if TYPE_CHECKING:
    from elaunch.agent.forkserver.warm.client import Borrowed, Cold, Origin

    Process = subprocess.Popen[bytes] | Borrowed

_ORDER_WAIT_S = 60.0
_REAPS_S = 1.0


Fds = tuple[int, ...]


@dataclass(frozen=True)
class Home:
    """Where a process belongs: its generation, and the folder of that generation's cgroup (empty without one)."""

    generation: int
    cgroup: str = ""


class ForkServer:
    """The fork server of one agent: a process and the socket to it. `restart` replaces both.

    `packages` as in `Boot`. With `warm_s` it is forked from a fork server that an earlier job has left behind and that
    has imported `warm_preload`, if that fits; `preload` is that then. `cold` says why it was not, `began_from` which
    one it was. The one that is left may be idle for so long. `sharers` as in `Boot`. `say` tells the user, while this
    object is made, what takes its time; `meanwhile` is what can be done in the time that a warm one takes. Make it as
    early as possible: it imports while the agent does its own work. Orders that come before it is ready wait in the
    socket. `fileno` is readable when `receive` has news.
    """

    def __init__(
        self,
        program: Program,
        preload: tuple[str, ...] | None,
        environment: Mapping[str, str],
        ignored: tuple[int, ...] = (),
        *,
        packages: tuple[str, ...] = (),
        warm_preload: tuple[str, ...] = (),
        warm_s: float = 0.0,
        sharers: int = 0,
        say: Callable[[str], None] = lambda _: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._program = program
        self._environment = environment
        self._ignored = ignored
        self.sharers = sharers
        self.preload = preload
        self.warm_preload = warm_preload
        self.packages = packages
        self._has_forked = False
        self.cold: Cold | None = None
        self.began_from: Origin | None = None
        self._socket, self._process = self._borrow(warm_s, say, meanwhile) if warm_s and warm_preload else self._start()

    def restart(self) -> None:
        """Start another fork server after `stop` or `lost`. It imports what `preload` names now. Raises OSError."""
        self._socket, self._process = self._start()
        self._has_forked = False

    def preload_nothing(self) -> None:
        """From the next `restart` on each worker is a fresh interpreter."""
        self.preload, self.warm_preload, self.packages = None, (), ()

    def _borrow(
        self, warm_s: float, say: Callable[[str], None], meanwhile: Callable[[], None]
    ) -> tuple[socket.socket, Process]:
        # Imported here: most jobs have no use for it.
        from elaunch.agent.forkserver.warm.client import Cold, borrow

        ours, theirs = wire.pair()
        try:
            process = borrow(self._boot(theirs, self.warm_preload), self._environment, theirs, warm_s, say, meanwhile)
        except Cold as error:
            self.cold = error
            ours.close()
            return self._start()
        finally:
            theirs.close()
        self.began_from, self.preload = process.origin, self.warm_preload
        ours.setblocking(False)
        return ours, process

    def _boot(self, control: socket.socket, preload: tuple[str, ...] | None) -> wire.Boot:
        return wire.Boot(
            os.getpid(),
            control.fileno(),
            self._program,
            preload,
            self._environment.get("PYTHONPATH"),
            self._ignored,
            packages=self.packages,
            sharers=self.sharers,
        )

    def _start(self) -> tuple[socket.socket, Process]:
        ours, theirs = wire.pair()
        boot = self._boot(theirs, self.preload)
        boot_fd = boot.memfd()
        command, environment = boot.command(self._environment, boot_fd)
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                # A sitecustomize or a preloaded module may print. On stderr no pipeline reads that as data.
                stdout=2,
                pass_fds=(boot_fd, theirs.fileno()),
                start_new_session=True,
            )
        finally:
            os.close(boot_fd)
            theirs.close()
        ours.setblocking(False)
        return ours, process

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, home: Home, local_rank: int, env: dict[str, str], cpus: list[int] | None, fds: Fds) -> None:
        """Order a worker. `fds` become its fds 0 to 3. Raises OSError if the fork server is gone."""
        self._order("worker", home, local_rank, {"local_rank": local_rank, "env": env, "cpus": cpus}, fds)

    def spawn_store(self, home: Home, host: str, port: int, fds: Fds) -> None:
        """Order a worker store. `fds` become its fds 0 to 4: 3 is the listening socket, 4 its control socket."""
        self._order("store", home, "store", {"host": host, "port": port}, fds)

    def _order(self, op: str, home: Home, key: int | str, details: dict[str, Any], fds: Fds) -> None:
        order = {"op": op, "generation": home.generation, "key": key, "cgroup": home.cgroup}
        self._send({**order, **details}, fds)

    def signal(self, generation: int, keys: Sequence[int | str], signum: int, *, group: bool) -> None:
        """Signal those that still live, one right after the other, or their process groups.

        `keys` are local ranks, or "store" for the worker store.
        """
        self._send({"op": "signal", "keys": keys, "generation": generation, "signum": int(signum), "group": group})

    def ping(self) -> None:
        """Ask the fork server for the answer "here"."""
        self._send({"op": "ask"})

    def _send(self, order: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            wire.send(self._socket, order, fds)
        except BlockingIOError:
            # While the fork server imports, the socket holds orders for about 90 workers. Then wait until it reads.
            select.select([], [self._socket], [], _ORDER_WAIT_S)
            wire.send(self._socket, order, fds)

    def receive(self) -> dict[str, Any] | None:
        """The next piece of news, or None where the fork server is gone. Raises BlockingIOError where there is none."""
        packet = wire.receive(self._socket)
        if packet is None:
            return None
        self._has_forked |= packet[0]["event"] == "forked"
        return packet[0]

    def stop(self) -> None:
        """End the fork server and, by the kernel, all its children."""
        if self._has_forked and not is_stopped(self.pid):
            self._let_reap()
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _let_reap(self) -> None:
        """Let it reap its dead, and end."""
        until_s = time.monotonic() + _REAPS_S
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while select.select([self._socket], [], [], max(until_s - time.monotonic(), 0.0))[0]:
                if self.receive() is None:
                    return

    def lost(self) -> str:
        """Words that say how a lost fork server has ended."""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._process.kill()
        return self._ended()

    def _ended(self) -> str:
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
