"""Connections to a host by name, within a deadline."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

HostAddress = tuple[socket.AddressFamily, tuple[Any, ...]]

# The kernel retransmits a lost SYN after a second, which may be longer than the deadline.
_RETRY_S = 0.2
# A connection to a host that disappeared is given up after this long: sent data is not acknowledged, or keepalive
# probes on an idle connection get no response.
_GONE_MS = 5000
_IDLE_S, _PROBE_EVERY_S = 2, 1
# The errors of an unreachable host or network. EACCES is a firewall's "administratively prohibited" in IPv6.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES}
_MOMENT_S = 0.001


class NoResponse(TimeoutError):
    """The deadline has passed without a response: no address has accepted or refused."""


class Deadline:
    """A point in time; `left` is how many seconds remain."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end_s = time.monotonic() + seconds

    def left(self) -> float:
        """The remaining seconds. Raises TimeoutError if there are none."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def left_to_read(self) -> float:
        """The remaining seconds, and after the deadline a moment to read what has arrived already.

        The response may have arrived while this thread waited for a CPU. Raises TimeoutError after twice the time.
        """
        left_s = self._end_s - time.monotonic()
        if left_s <= -self._seconds:
            raise TimeoutError
        return max(left_s, _MOMENT_S)

    def __str__(self) -> str:
        return f"{self._seconds:.3g} s"


def is_silence(error: OSError) -> bool:
    """Whether the other host did not respond. Else it refused, or this host could not open a connection."""
    return isinstance(error, NoResponse) or error.errno in _SILENT


def dial(addresses: Sequence[HostAddress], left: Callable[[], float]) -> socket.socket:
    """A connection to the first of these addresses that accepts one. `left` returns the remaining seconds, or raises.

    An address that is silent for a moment is tried again after the others, so a lost packet costs only that moment.
    Raises an OSError if all failed. A refusal comes first: it proves that the host is up. Silence comes last, after
    errors of this host, such as too many open files, which leave the state of the other unknown.
    """
    errors: list[OSError] = []
    untried, wait_s = list(addresses), _RETRY_S
    while untried:
        silent: list[HostAddress] = []
        for number, (family, address) in enumerate(untried):
            try:
                if made := _connected(family, address, min(wait_s, left() / (len(untried) - number))):
                    return made
                silent.append((family, address))
            except TimeoutError as error:
                # The deadline has passed, or the kernel has given up.
                errors.append(error if error.errno else NoResponse("timed out"))
            except OSError as error:
                # A host without IPv6 refuses its addresses immediately, whatever their port.
                is_no_ipv6 = family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                errors.append(OSError(errno.ENETUNREACH, error.strerror) if is_no_ipv6 else error)
        # Backoff: the round trip may be long.
        untried, wait_s = silent, 2 * wait_s
    raise min(
        errors or [OSError("it has no address")],
        key=lambda it: (not isinstance(it, ConnectionRefusedError), is_silence(it), not isinstance(it, NoResponse)),
    )


def _connected(family: socket.AddressFamily, address: tuple[Any, ...], wait_s: float) -> socket.socket | None:
    """A connection; None without a response within `wait_s`."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.settimeout(wait_s)
        made.connect(address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
        return made
    except BaseException as error:
        made.close()
        # The kernel's own ETIMEDOUT is a TimeoutError too, with a number.
        if isinstance(error, TimeoutError) and not error.errno:
            return None
        raise


class _Lookup(threading.Thread):
    """One call of the system's resolver, which has no deadline. It may hang without harm."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name=f"resolve {host}", daemon=True)
        self._host, self._port = host, port
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            _known[self._host, self._port] = _lookup(self._host, self._port)
        except OSError as error:
            self.error = error


_known: dict[tuple[str, int], list[HostAddress]] = {}
_pending: dict[tuple[str, int], _Lookup] = {}
_lock = threading.Lock()


def resolve(host: str, port: int, wait_s: float) -> list[HostAddress]:
    """The stream addresses of `host`. If the resolver fails or is too slow: the result of an earlier call.

    Raises socket.gaierror if there is no such result either, another OSError if no thread can be started.
    """
    if numeric := _numeric(host, port):
        return numeric
    with _lock:
        lookup = _pending.get((host, port))
        if lookup is None or not lookup.is_alive():
            lookup = _pending[host, port] = _Lookup(host, port)
            try:
                lookup.start()
            except RuntimeError as error:
                lookup.error = OSError(errno.EAGAIN, str(error))
    if lookup.ident:
        lookup.join(max(wait_s, 0))
    if found := _known.get((host, port)):
        return found
    raise lookup.error or socket.gaierror(socket.EAI_AGAIN, f"no response from the resolver within {wait_s:.3g} s")


@lru_cache
def _numeric(host: str, port: int) -> list[HostAddress]:
    """The addresses if `host` is a numeric address; empty if it is a name."""
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)
    except OSError:
        return []


def _lookup(host: str, port: int, flags: int = 0) -> list[HostAddress]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except ValueError:
        # IDNA cannot encode some names (an empty label, a lone surrogate); others contain a NUL.
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is not a host name") from None
    return [(family, address) for family, _, _, _, address in found]
