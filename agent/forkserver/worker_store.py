"""The process behind MASTER_ADDR:MASTER_PORT: a TCPStore for one generation, on a socket that was bound before.

The store has a process of its own, so that the death of rank 0 does not hide the real error. Each generation has a new
store, so that no key of an older generation is read again.
"""

from __future__ import annotations

import os
import site
import socket
import sys
from typing import NoReturn

from elaunch.agent.forkserver import wire

LISTEN_FD = 3
CONTROL_FD = 4


def serve(host: str, port: int) -> NoReturn:
    """Host the store until the agent asks for the number of its keys, or is gone."""
    control = socket.socket(fileno=CONTROL_FD)
    try:
        if sys.flags.no_site:
            # A bare fork server has not looked for installed packages.
            site.main()
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=LISTEN_FD)
    except Exception as error:
        wire.send(control, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    wire.send(control, {"up": True})
    if wire.receive(control):
        wire.send(control, {"keys": store.num_keys()})
    # Python's and C++'s destructors have nothing left to do.
    os._exit(0)
