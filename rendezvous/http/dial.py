"""A TCP connection to a host that may have several addresses, over a network that may lose packets."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from elaunch.rendezvous.http.resolve import HostAddress

# The kernel repeats a lost SYN after a second, which may be longer than the deadline.
_AGAIN_S = 0.2
# A connection to a host that disappeared is given up after this long: sent data is not acknowledged, or keepalive
# probes on an idle connection are not answered.
_GONE_MS = 5000
_IDLE_S, _ASK_EVERY_S = 2, 1


# The errors of an unreachable host or network. EACCES is a firewall's "administratively prohibited" in IPv6.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES}
# A host without IPv6 refuses its addresses at once. Other addresses of the same name may still work.
_WITHOUT_IPV6 = {errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


class NoAnswer(TimeoutError):
    """The time is over, and no address has answered: neither accepted nor refused."""


def is_silence(error: OSError) -> bool:
    """Whether the other host was silent. Else it has refused, or this host has opened no connection at all."""
    return isinstance(error, NoAnswer) or error.errno in _SILENT


def dial(addresses: Sequence[HostAddress], left: Callable[[], float]) -> socket.socket:
    """The first connection that one of these addresses accepts. `left` returns the remaining seconds, or raises.

    The next address is tried if one has refused, or is silent for a moment; earlier tries go on meanwhile (RFC 8305).
    If all addresses are silent, they are tried again, so a lost packet costs only a moment. The socket does not block.
    Raises an OSError if all have failed. A refusal goes before all others: it proves that the host is up. Silence goes
    last: an error of this host, as too many open files, says nothing of the other.
    """
    untried = deque(dict.fromkeys(addresses))
    tries: dict[int, tuple[socket.socket, HostAddress]] = {}
    errors: list[OSError] = []
    no_ipv6: list[OSError] = []
    poll = select.poll()
    try:
        while untried or tries:
            if untried:
                address = untried.popleft()
                try:
                    begun = _begin(address)
                except OSError as error:
                    is_no_ipv6 = address[0] == socket.AF_INET6 and error.errno in _WITHOUT_IPV6
                    (no_ipv6 if is_no_ipv6 else errors).append(error)
                    continue
                tries[begun.fileno()] = begun, address
                poll.register(begun, select.POLLOUT)
            # The remaining time must be enough to try every address.
            ready = poll.poll(1000 * min(_AGAIN_S, left() / (len(untried) + 1)))
            failed: set[int] = set()
            for fd, _ in ready:
                tried, address = tries[fd]
                if not (code := tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    _set_options(tried)
                    return tries.pop(fd)[0]
                errors.append(OSError(code, os.strerror(code)))
                failed.add(fd)
                if code == errno.ECONNREFUSED:
                    # Nobody listens there, so other tries of the same address fail too.
                    failed.update(other for other, (_, its) in tries.items() if its == address)
            for fd in failed:
                poll.unregister(fd)
                tries.pop(fd)[0].close()
            if not ready and not untried:
                untried.extend(dict.fromkeys(address for _, address in tries.values()))
    except TimeoutError:
        most = _telling([*errors, NoAnswer("timed out")])
        raise TimeoutError("timed out") if isinstance(most, ConnectionRefusedError) else most from None
    finally:
        for tried, _ in tries.values():
            tried.close()
    raise _telling(errors or no_ipv6 or [OSError("it has no address")])


def _telling(errors: Sequence[OSError]) -> OSError:
    """The most specific error: a refusal, then an error of this host, then silence."""
    return min(errors, key=lambda error: (not isinstance(error, ConnectionRefusedError), is_silence(error)))


def _begin(address: HostAddress) -> socket.socket:
    family, place = address
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    if (code := made.connect_ex(place)) not in (0, errno.EINPROGRESS):
        made.close()
        raise OSError(code, os.strerror(code))
    return made


def _set_options(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
