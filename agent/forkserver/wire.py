"""Messages between the agent and its fork server: one JSON object per packet, with file descriptors beside it."""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

from elaunch.agent.linux import descriptors
from elaunch.strict_json import parse_json

_PACKET_BYTES_MAX = 128 << 10
_FDS_MAX = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep packets whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one packet. The fds are duplicated into the other process. Raises OSError if the other end is gone."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([json.dumps(message).encode()], rights)


def receive(end: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]] | None:
    """The next packet and its fds (close-on-exec). None if the peer is gone, or sends something that is no message.

    Raises BlockingIOError if `end` does not block and no packet waits.
    """
    try:
        data, ancillary, _, _ = end.recvmsg(_PACKET_BYTES_MAX, socket.CMSG_SPACE(_FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    if not data:
        return None
    found = descriptors(ancillary)
    try:
        message = parse_json(data)
        if not isinstance(message, dict):
            raise ValueError("no object")
    except ValueError:
        # The packet was cut off, so the other end is of no use any more. Nobody else would close these descriptors.
        for fd in found:
            os.close(fd)
        return None
    return message, found
