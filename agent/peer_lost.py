"""What a survivor says when another rank is gone; pure. A forked worker reads its own exception by it too."""

from __future__ import annotations

import re

# What gloo and the Keeper's connections say of a collective that timed out, and for how long they waited. Without case.
TIMED_OUT = (
    r"timed out waiting (?P<ms>\d{1,20})ms for (?:recv|send) operation"
    r"|collective operation timeout: waited (?P<s>\d[\d.e+]{0,12}) s for"
)
# What survivors say when another rank is gone, from gloo, TCPStore, NCCL and RPC's TensorPipe.
PEER_LOST = re.compile(
    r"connection (?:reset|closed|refused) by (?:remote )?peer|connection was likely closed|broken pipe"
    r"|socket timeout|failed to recv, got 0 bytes|ncclremoteerror|remote process exited|peer .{0,200} disconnected"
    r"|so_error: connection refused|collective operation timeout"
    r"|client socket has (?:failed to connect|timed out)|seconds waiting for clients"
    r"|\(this error originated at tensorpipe/"
    # The Keeper's words for the status of a group.
    r"|\((?:TIMEOUT|COMM_ERROR|REMOTE_ERROR), group \w"
    rf"|{TIMED_OUT}",
    re.IGNORECASE,
)
# A search takes 60 ns for each character, so only this much of each end of a longer message is searched.
_END_CHARACTERS = 8 << 10
# Raised by Python's own sockets and pipes: an upload, a closed terminal. torch has types of its own for its peers.
_PYTHON_SOCKET_TYPES = {
    *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
    *("BrokenPipeError", "TimeoutError"),
}


def is_peer_lost(exception: str, message: str) -> bool:
    """Whether an exception with that name of its type only says that another rank is gone."""
    return exception not in _PYTHON_SOCKET_TYPES and bool(PEER_LOST.search(ends(message)))


def ends(message: str) -> str:
    """The part of a message to search: its ends, if it is long. A program may raise megabytes, with the cause there."""
    if len(message) <= 2 * _END_CHARACTERS:
        return message
    return f"{message[:_END_CHARACTERS]}\n{message[-_END_CHARACTERS:]}"
