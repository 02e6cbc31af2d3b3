"""Addresses of a host name, within a deadline. The system's resolver has no deadline, so it runs in a thread."""

from __future__ import annotations

import errno
import socket
import threading
from functools import lru_cache
from typing import Any

HostAddress = tuple[socket.AddressFamily, tuple[Any, ...]]


class _Lookup(threading.Thread):
    """One call of the resolver. It may hang without harm."""

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
    """The stream addresses of `host`. If the resolver does not answer in time: the result of an earlier call.

    Raises socket.gaierror if there is no such result either, another OSError if this process has no thread for it.
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
    raise lookup.error or socket.gaierror(socket.EAI_AGAIN, f"no word from the resolver within {wait_s:.3g} s")


@lru_cache
def _numeric(host: str, port: int) -> list[HostAddress]:
    """The addresses if `host` is a numeric address; empty if it is a name."""
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)
    except OSError:
        return []


def _lookup(host: str, port: int, flags: int = 0) -> list[HostAddress]:
    # Python encodes a str as IDNA first, and loading its tables takes 3 ms.
    name = host.encode() if host.isascii() else host
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    except ValueError:
        # IDNA cannot encode some names (an empty label, a lone surrogate); others contain a NUL.
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name of a host") from None
    return [(family, address) for family, _, _, _, address in found]
