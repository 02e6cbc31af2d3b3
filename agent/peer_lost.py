"""The errors of a survivor when another rank is gone; pure. A forked worker reads its own exception by it too."""

from __future__ import annotations

import re

# The errors of gloo and the Keeper's connections after a collective's timeout, with how long they waited. Without case.
TIMED_OUT = (
    r"timed out waiting (?P<ms>\d{1,20})ms for (?:recv|send) operation"
    r"|collective operation timeout: waited (?P<s>\d[\d.e+]{0,12}) s for"
)
# The errors of a connection whose other end is gone, as in glibc.
_NETWORK = (
    r"connection (?:reset by peer|refused|timed out)|software caused connection abort|broken pipe|no route to host"
    r"|(?:network|machine) is (?:unreachable|down|not on the network)|host is down|network dropped connection on reset"
    r"|transport endpoint is not connected|cannot send after transport endpoint shutdown"
)
# Where gloo's transport names its source: "[…/gloo/transport/tcp/pair.cc:553] ". Its other errors are the rank's own.
_GLOO = r"\[(?:enforce fail at )?(?:[^\s\]]{0,200}\bgloo/[^\s\]]{0,100}|(?:unbound_)?(?:buffer|pair))\.cc:\d{1,6}\] "
# How NCCL names the other end, gloo an address, and torch's TCPStore a socket.
_OTHER_END = r"(?:\S<\d{1,5}>|\bSO_ERROR:|\b(?:recv|send)\w{0,30} failed\b|\bCall to (?:connect|recv|send) failed ?:)"
# The errors of survivors when another rank is gone: gloo's, TCPStore's, NCCL's, RPC's TensorPipe's. One of the network
# alone may be the program's own: it counts behind what only a library that connects ranks writes.
PEER_LOST = re.compile(
    rf"(?:{_GLOO}|connectFullMesh failed with )[^\n]{{0,300}}?(?:connection closed|socket (?:unexpectedly )?closed"
    rf"|(?:read|write|connect) timeout|timed out|no error|SSL_(?:read|write) |short (?:read|write)|pair is not"
    rf"|{_NETWORK})"
    rf"|{_OTHER_END}[^\n]{{0,300}}?(?:{_NETWORK})"
    r"|application timeout caused pair closure|failed to pass monitoredBarrier|logs for faulty rank"
    r"|ncclRemoteError|remote process exited|connection closed by (?:remote peer|peer \[)|got completion from peer"
    r"|socket recv failed while polling for opId|NCCL timeout (?:in|when)"
    r"|collective operation timeout|collective timeout from"
    # The reason may be one of this rank.
    r"|NCCL communicator was aborted on rank \d{1,9}\.(?! {0,2}Original reason)"
    r"|0 bytes\. connection was likely closed|(?-i:Socket Timeout)"
    r"|client socket has (?:failed to connect|timed out)|seconds waiting for clients"
    r"|\(this error originated at tensorpipe/"
    # The Keeper's messages about a group, and about its own connections.
    r"|\((?:TIMEOUT|COMM_ERROR|REMOTE_ERROR), group \w|\brank \d{1,9} is gone or has failed: "
    rf"|{TIMED_OUT}",
    re.IGNORECASE,
)
# torch's own exceptions. Of an older torch, they are a RuntimeError with the kernel's message.
_TORCHS = {"DistNetworkError", "DistBackendError", "DistStoreError", "DistError"}
# A search takes 60 ns for each character, so only this much of each end of a longer message is searched.
_END_CHARACTERS = 8 << 10
# Raised by Python's own sockets and pipes: an upload, a closed terminal. torch has types of its own for its peers.
_PYTHON_SOCKET_TYPES = {
    *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
    *("BrokenPipeError", "TimeoutError"),
}


def is_peer_lost(exception: str, message: str, *, in_torch: bool = True) -> bool:
    """Whether an exception with that name of its type only reports that another rank is gone.

    `in_torch`: it was raised while the rank waited for others in torch, or that is not known.
    """
    name = exception.rpartition(".")[2]
    if name in _PYTHON_SOCKET_TYPES:
        return False
    text = ends(message)
    if name == "PeerLost" or PEER_LOST.search(text):
        return True
    # Not compiled at the import: few errors get here.
    if name in _TORCHS or (name == "RuntimeError" and in_torch):
        return bool(re.search(_NETWORK, text, re.IGNORECASE))
    return name == "RuntimeError" and bool(re.fullmatch(_NETWORK, text.strip(), re.IGNORECASE))


def ends(message: str) -> str:
    """The part of a message to search: its ends, if it is long. A program may raise megabytes, with the cause there."""
    if len(message) <= 2 * _END_CHARACTERS:
        return message
    return f"{message[:_END_CHARACTERS]}\n{message[-_END_CHARACTERS:]}"
