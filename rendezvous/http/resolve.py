"""Addresses of a host name, within a deadline: the system's resolver has none."""

from __future__ import annotations

import socket
import threading
from functools import lru_cache
from typing import Any

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


class _Lookup(threading.Thread):
    """One question to the resolver, which may hang in it for as long as it likes."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name=f"resolve {host}", daemon=True)
        self._host, self._port = host, port
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            _known[self._host, self._port] = _lookup(self._host, self._port)
        except OSError as error:
            self.error = error


_known: dict[tuple[str, int], list[Address]] = {}
_pending: dict[tuple[str, int], _Lookup] = {}
_lock = threading.Lock()


def resolve(host: str, port: int, wait_s: float) -> list[Address]:
    """The stream addresses of `host`; those of an earlier call where the resolver does not answer in time.

    Raises socket.gaierror where there are none.
    """
    if numeric := _numeric(host, port):
        return numeric
    with _lock:
        lookup = _pending.get((host, port))
        if lookup is None or not lookup.is_alive():
            lookup = _pending[host, port] = _Lookup(host, port)
            lookup.start()
    lookup.join(max(wait_s, 0))
    if found := _known.get((host, port)):
        return found
    raise lookup.error or socket.gaierror(socket.EAI_AGAIN, f"no word from the resolver within {wait_s:.3g} s")


@lru_cache
def _numeric(host: str, port: int) -> list[Address]:
    """Of what is an address already; none of a name."""
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)
    except OSError:
        return []


def _lookup(host: str, port: int, flags: int = 0) -> list[Address]:
    # As text it would first be made IDNA, whose tables take 3 ms to load.
    name = host.encode() if host.isascii() else host
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    except ValueError:
        # Names that IDNA has no form for (an empty label, a lone surrogate), and names with a NUL.
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no name of a host") from None
    return [(family, address) for family, _, _, _, address in found]
