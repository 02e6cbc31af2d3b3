"""TCP sockets between ranks: how they are set up, and what the kernel knows of the host at the other end."""

from __future__ import annotations

import socket
import struct

# A host that is gone is noticed after 30 s, with three packets that it has not answered. A route that moves to another
# link is back by then. Without an agent nobody else notices; an agent's lease ends long before.
_IDLE_S, _PROBE_S, _UNANSWERED = 15, 5, 3
SILENT_S = _IDLE_S + _PROBE_S * _UNANSWERED
# Linux's struct tcp_info: state, retransmits and probes are bytes, tcpi_last_ack_recv is a number of milliseconds.
_INFO = struct.Struct("=BxBB52xI")
_SYN_SENT = 2


def listening(address: str, backlog: int) -> socket.socket:
    """A socket that listens at `address`, at a port that the kernel chooses.

    `backlog` connections may wait. For each the kernel keeps what a stranger sends, 128 kB or so.
    """
    made = socket.socket(_family(address))
    try:
        made.setblocking(False)
        made.bind((address, 0))
        made.listen(backlog)
    except OSError as error:
        made.close()
        # A link-local address of IPv6, for example, which is nothing without an interface.
        why = f"this rank cannot listen at {address} ({error.strerror}), so the other ranks cannot reach it"
        raise OSError(f"{why}; GLOO_SOCKET_IFNAME=… names the interface to use") from error
    return made


def unconnected(address: str) -> socket.socket:
    """A socket with which to connect to `address`."""
    return tuned(socket.socket(_family(address)))


def tuned(made: socket.socket) -> socket.socket:
    """The socket, which does not block from now on, sends at once, and notices that the other host is gone."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _UNANSWERED)
    return made


def is_silent(made: socket.socket) -> bool:
    """Whether the other host has answered nothing for `SILENT_S`, and none of the last packets that need an answer.

    Keepalive sends no probe while something is not acknowledged: the kernel sends that again, for about 15 minutes.
    TCP_USER_TIMEOUT would make these fewer, but it would also end a connection whose receiver lives and is too busy to
    read. The host of such a receiver answers each packet.
    """
    info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    state, retransmits, probes, heard_ms = _INFO.unpack(info)
    # The kernel itself limits how long it tries to connect.
    is_unanswered = max(retransmits, probes) >= _UNANSWERED and heard_ms >= 1000 * SILENT_S
    return bool(state != _SYN_SENT and is_unanswered)


def has_unread(made: socket.socket) -> bool:
    try:
        return bool(made.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
