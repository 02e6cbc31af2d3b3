"""The process behind MASTER_ADDR:MASTER_PORT: a TCPStore for one generation, on a socket that was bound before.

The store has a process of its own, so that the death of rank 0 does not hide the real error. Each generation has a new
store, so that no key of an older generation is read again.
"""

from __future__ import annotations

import importlib
import os
import select
import site
import socket
import sys
from typing import Any, NoReturn

from elaunch.agent.forkserver import wire
from elaunch.agent.linux import set_command_line

LISTEN_FD = 3
CONTROL_FD = 4
# `import torch` takes 2 s of CPU, and many programs never connect. Those that do first import torch themselves, which
# takes longer than this.
_IDLE_S = 0.8


def serve(host: str, port: int, *, store_class: Any = None) -> NoReturn:
    """Host the store until the agent asks for the number of its keys, or is gone.

    `store_class` is torch's TCPStore, if this process has it.
    """
    set_command_line(("elaunch: worker store",), "elaunch-store")
    control = socket.socket(fileno=CONTROL_FD)
    try:
        if not store_class:
            _wait_for_a_rank(control)
        if sys.flags.no_site:
            # A bare fork server has not looked for installed packages.
            site.main()
        made = store_class or _class()
        store = made(host, port, is_master=True, wait_for_workers=False, master_listen_fd=LISTEN_FD)
    except Exception as error:
        wire.send(control, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    wire.send(control, {"up": True})
    if wire.receive(control):
        wire.send(control, {"keys": store.num_keys()})
    # Python's and C++'s destructors have nothing left to do.
    os._exit(0)


def _wait_for_a_rank(control: socket.socket) -> None:
    """Stay idle until a rank connects, or for a while. Ends the process if the agent ends the store meanwhile."""
    wire.send(control, {"idle": True})
    doors = select.poll()
    doors.register(LISTEN_FD, select.POLLIN)
    doors.register(CONTROL_FD, select.POLLIN)
    came = [fd for fd, _ in doors.poll(1000 * _IDLE_S)]
    if came == [CONTROL_FD]:
        if wire.receive(control):
            wire.send(control, {"keys": 0})
        os._exit(0)
    wire.send(control, {"idle": False})


def _class() -> Any:
    return importlib.import_module("torch.distributed").TCPStore
