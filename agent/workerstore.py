"""The process behind MASTER_ADDR:MASTER_PORT: a TCPStore for one generation, on a socket that was bound before.

Its own process, so that the death of rank 0 does not hide the real error, and no key of an older generation is read
again.
"""

from __future__ import annotations

import json
import os
import socket

LISTEN_FD = 3
CONTROL_FD = 4


def serve(host: str, port: int) -> None:
    """Host the store until the agent asks for the number of its keys, or is gone."""
    control = socket.socket(fileno=CONTROL_FD)
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=LISTEN_FD)
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    if control.recv(16):
        control.send(json.dumps({"keys": store.num_keys()}).encode())
    # No Python or C++ destructor has anything to add.
    os._exit(0)
