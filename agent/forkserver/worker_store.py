"""The process behind MASTER_ADDR:MASTER_PORT: a TCPStore for one generation, on a socket that was bound before.

The store has a process of its own, so that the death of rank 0 does not hide the real error. Each generation has a new
store, so that no key of an older generation is read again.
"""

from __future__ import annotations

import os
import select
import site
import socket
import sys
from typing import Any, NoReturn

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.boot import bare_command
from elaunch.agent.forkserver.tcp_store import Unlike, has_torch, tcp_store, whole_tcp_store
from elaunch.agent.linux import set_command_line

LISTEN_FD = 3
CONTROL_FD = 4
# Torch's native code takes 0.3 s of CPU, and many programs never connect. Those that do first import torch themselves,
# which takes longer than this.
_IDLE_S = 0.8


def serve_whole(host: str, port: str) -> NoReturn:
    """`serve`, in a process that has just been started."""
    serve(host, int(port), whole=True)


def serve(host: str, port: int, *, whole: bool, store_class: Any = None) -> NoReturn:
    """Host the store until the agent asks for the number of its keys, or is gone. `whole`: import all of torch.

    `store_class` is torch's TCPStore, if this process has it. To import it as a program does would also start the
    threads of OpenBLAS, which spin for 0.1 s.
    """
    set_command_line(("elaunch: worker store",), "elaunch-store")
    control = socket.socket(fileno=CONTROL_FD)
    try:
        # A bare fork server has not looked for installed packages.
        is_bare = sys.flags.no_site
        if not whole and not store_class and (is_bare or not has_torch()):
            _wait_for_a_rank(control)
        if is_bare:
            site.main()
        made = store_class or _class(host, port, whole=whole)
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


def _class(host: str, port: int, *, whole: bool) -> Any:
    if whole:
        return whole_tcp_store()
    try:
        return tcp_store()
    except Unlike:
        for fd in (LISTEN_FD, CONTROL_FD):
            os.set_inheritable(fd, True)
        command = bare_command("worker_store", "serve_whole", host, str(port))
        os.execv(command[0], command)
