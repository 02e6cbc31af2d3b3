"""The agent's end of the fork server (see server.py)."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from elaunch.agent.forkserver import warm_client, wire
from elaunch.agent.forkserver.warm_client import Borrowed, Cold
from elaunch.agent.linux import is_stopped
from elaunch.rendezvous.job_spec import Program

_ORDER_WAIT_S = 60.0
_REAPS_S = 1.0
_STAYS_S = 5.0


Fds = tuple[int, ...]


class ForkServer:
    """The fork server of one agent: a process and the socket to it. `restart` replaces both.

    `packages` as in `Boot`. With `warm_s` it is forked from one that an earlier run has left behind, if that fits, and
    may be left behind itself (`stay`), idle for so long. `is_warm` says whether it was forked, `how` is a sentence on
    that. Make it as early as possible: it imports while the agent does its own work. Orders that come before it is
    ready wait in the socket. `fileno` is readable when `receive` has news.
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
        self._has_forked = self._has_imported = self._is_left = False
        self._socket, self._process = self._borrow() if self._warm_s else self._start()

    def restart(self) -> None:
        """Start another fork server after `stop` or `lost`. It imports what `preload` names now. Raises OSError."""
        self._socket, self._process = self._start()
        self._has_forked = self._has_imported = self.is_warm = False

    def preload_nothing(self) -> None:
        """From the next `restart` on each worker is a fresh interpreter."""
        self.preload, self.packages = None, ()

    def _borrow(self) -> tuple[socket.socket, subprocess.Popen[bytes] | Borrowed]:
        ours, theirs = wire.pair()
        try:
            process = warm_client.borrow(self._boot(theirs, self.preload), theirs)
        except Cold as error:
            self.how = f"cold start: {error}" if str(error) else ""
            ours.close()
            return self._start()
        finally:
            theirs.close()
        clock = time.strftime("%H:%M", time.localtime(float(process.server["since"])))
        self.how = f"warm start: from the fork server that stayed since {clock} (pid {process.server['pid']})"
        self.is_warm = True
        ours.setblocking(False)
        return ours, process

    def stay(self) -> str:
        """After the job: leave it behind for later runs, if that is wanted. Returns a sentence for the log, if any."""
        if not self._warm_s or not self.preload or not self._has_imported or self.is_warm:
            return ""
        try:
            path = warm_client.place_for(self._program)
            self._socket.settimeout(_STAYS_S)
            self._send({"op": "stay", "path": os.fspath(path), "idle_s": self._warm_s})
            while (news := self.receive()) and news["event"] != "left":
                pass
            why = news["why"] if news else "it has ended"
        except (Cold, OSError) as error:
            why = str(error)
        if why:
            return f"no fork server stays: {why}"
        self._is_left = True
        self._socket.close()
        minutes = f"{self._warm_s / 60:g} min"
        return f"a fork server stays for {minutes}, so that the next start needs no import; elaunch warm --stop ends it"

    def _boot(self, control: socket.socket, preload: tuple[str, ...] | None) -> wire.Boot:
        facts = warm_client.facts(self._program, self._ignored) if self._warm_s else {}
        return wire.Boot(
            os.getpid(),
            control.fileno(),
            self._program,
            preload,
            self._environment.get("PYTHONPATH"),
            self._ignored,
            packages=self.packages,
            facts=tuple(facts.items()),
            environment=tuple(self._environment.items()) if self._warm_s else (),
        )

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes] | Borrowed]:
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

    def spawn(self, generation: int, local_rank: int, env: dict[str, str], cpus: list[int] | None, fds: Fds) -> None:
        """Order a worker. `fds` become its fds 0 to 3. Raises OSError if the fork server is gone."""
        self._order("worker", generation, local_rank, {"local_rank": local_rank, "env": env, "cpus": cpus}, fds)

    def spawn_store(self, generation: int, host: str, port: int, fds: Fds) -> None:
        """Order a worker store. `fds` become its fds 0 to 4: 3 is the listening socket, 4 its control socket."""
        self._order("store", generation, "store", {"host": host, "port": port}, fds)

    def _order(self, op: str, generation: int, key: int | str, details: dict[str, Any], fds: Fds) -> None:
        self._send({"op": op, "generation": generation, "key": key, **details}, fds)

    def signal(
        self, generation: int, keys: Sequence[int], signum: int, *, group: bool, is_notice: bool = False
    ) -> None:
        """Signal those that still live, one right after the other, or their process groups.

        `keys` are local ranks. A scheduler that gave its notice to the fork server too has given it to all processes:
        with `is_notice` they do not get it again.
        """
        order = {"op": "signal", "keys": keys, "generation": generation, "signum": int(signum), "group": group}
        self._send(order | {"is_notice": is_notice})

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
        news = packet[0]
        self._has_forked |= news["event"] == "forked"
        self._has_imported |= news["event"] == "ready" and not news["reason"]
        return news

    def stop(self) -> None:
        """End the fork server and, by the kernel, all its children. One that stays goes on."""
        if self._is_left:
            return
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
