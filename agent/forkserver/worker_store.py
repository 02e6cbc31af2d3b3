"""The process behind MASTER_ADDR:MASTER_PORT: a TCPStore for one generation, on a socket that was bound before.

The store has a process of its own, so that the death of rank 0 does not hide the real error. Each generation has a new
store, so that no key of an older generation is read again.
"""

from __future__ import annotations

import importlib
import os
import site
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.tcp_store import Unlike, tcp_store
from elaunch.agent.linux import set_command_line

LISTEN_FD = 3
CONTROL_FD = 4

# Without site, as a bare fork server is started; `serve` looks for installed packages itself.
_ANEW = (
    "import sys; there = [p for p in sys.path if p]; sys.path = [*there, sys.argv[1]]; "
    "from elaunch.agent.forkserver import worker_store; sys.path = there; "
    "worker_store.serve(sys.argv[2], int(sys.argv[3]), whole=True)"
)


def serve(host: str, port: int, *, whole: bool = False) -> NoReturn:
    """Host the store until the agent asks for the number of its keys, or is gone; `whole` is by all of torch."""
    set_command_line(("elaunch: worker store",), "elaunch-store")
    control = socket.socket(fileno=CONTROL_FD)
    try:
        if sys.flags.no_site:
            # A bare fork server has not looked for installed packages.
            site.main()
        store = _class(host, port, whole=whole)(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=LISTEN_FD
        )
    except Exception as error:
        wire.send(control, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    wire.send(control, {"up": True})
    if wire.receive(control):
        wire.send(control, {"keys": store.num_keys()})
    # Python's and C++'s destructors have nothing left to do.
    os._exit(0)


def _class(host: str, port: int, *, whole: bool) -> Any:
    if whole:
        return importlib.import_module("torch.distributed").TCPStore
    try:
        return tcp_store()
    except Unlike:
        for fd in (LISTEN_FD, CONTROL_FD):
            os.set_inheritable(fd, True)
        root = str(Path(__file__).parents[3])
        os.execv(sys.executable, [sys.executable, "-S", "-c", _ANEW, root, host, str(port)])
