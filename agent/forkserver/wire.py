"""The agent's protocol with its fork server: the first message, and packets with file descriptors."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaunch.agent.linux import memory_file
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.types import Program

# This variable, and this folder on PYTHONPATH, make an interpreter run elaunch's sitecustomize.
BOOT_VARIABLE = "ELAUNCH_BOOT"
HOOK_DIR = str(Path(__file__).with_name("hook"))
# The name of a warm fork server, as `ps -o comm` shows it.
PROCESS_NAME = "elaunch-warm"
# The name of a job's fork server.
SERVER_NAME = "elaunch-fork"
_PACKET_BYTES_MAX = 128 << 10
_FDS_MAX = 8


@dataclass(frozen=True)
class Boot:
    """The agent's first message to its fork server.

    `preload` names the modules to import. None means that each worker execs a fresh interpreter; `fallback` is then the
    reason, unless the user asked for it. `left_out` has log lines about modules of `preload` that workers import
    themselves. `packages` are other imports of the program's text (`ProgramText.packages`). `pythonpath` is the user's
    PYTHONPATH. `ignored` are signals that workers ignore from their start. `mask` is set in a fork server that has
    started again: the signals that were blocked when the agent started it. `facts` and `environment` are set if the
    fork server may stay for later runs (see warm.py): the names and values that must be equal in these.
    """

    agent_pid: int
    control_fd: int
    program: Program
    preload: tuple[str, ...] | None
    pythonpath: str | None
    ignored: tuple[int, ...] = ()
    fallback: str = ""
    left_out: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    mask: tuple[int, ...] | None = None
    facts: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def memfd(self) -> int:
        """A new descriptor from which this process, or one that inherits it, can `read` the message."""
        return memory_file("elaunch-boot", encode(self), outlives_exec=True)

    @classmethod
    def read(cls, fd: int) -> Boot:
        """Read the message from `fd`, and close `fd`."""
        with open(fd) as file:
            return decode(cls, file.read())

    def command(self, environment: Mapping[str, str], boot_fd: int) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a fork server that reads this message from `boot_fd`."""
        if self.preload is None:
            # It imports nothing, not even site: .pth files and customisations may run any code, and a process that only
            # execs does not need them.
            code = (
                "import sys; there = [p for p in sys.path if p]; sys.path = [*there, sys.argv[1]]; "
                f"from {__package__}.server import bare; sys.path = there; bare(sys.argv[2])"
            )
            root = str(Path(__file__).parents[3])
            return [sys.executable, "-S", "-c", code, root, str(boot_fd)], dict(environment)
        # With these variables an interpreter pauses in elaunch's sitecustomize (see server.py).
        hook = {"PYTHONPATH": _behind_hook(environment.get("PYTHONPATH")), BOOT_VARIABLE: str(boot_fd)}
        return list(self.program.argv), {**environment, **hook}


def reporting(environment: Mapping[str, str], crash_fd: int, *, reports_exit: bool) -> dict[str, str]:
    """`environment` with the variables by which a fresh worker prepares its reports (see reports.py)."""
    path = environment.get("PYTHONPATH")
    # The sitecustomize checks the first field: a fresh worker is not to pause.
    fields = f"fresh {crash_fd} {'unset' if path is None else 'set'} {int(reports_exit)}"
    return {**environment, "PYTHONPATH": _behind_hook(path), BOOT_VARIABLE: fields}


def _behind_hook(path: str | None) -> str:
    return f"{HOOK_DIR}{os.pathsep}{path}" if path else HOOK_DIR


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets with packet boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one packet. The fds are duplicated into the other process. Raises OSError if the peer is gone."""
    socket.send_fds(end, [json.dumps(message).encode()], fds)


def receive(end: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]] | None:
    """The next packet and its fds (close-on-exec). None if the peer is gone.

    Raises BlockingIOError if `end` does not block and no packet waits.
    """
    try:
        data, fds, _, _ = socket.recv_fds(end, _PACKET_BYTES_MAX, _FDS_MAX, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    return (json.loads(data), tuple(fds)) if data else None
