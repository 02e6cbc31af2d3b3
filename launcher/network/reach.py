"""Finds the address at which other nodes reach this host, and whether a name means this host.

The host's own name is not used: other hosts may not know it, and this host may resolve it to 127.0.1.1.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

from elaunch.launcher.network.interfaces import by_interface
from elaunch.rendezvous.addresses import is_loopback, is_meant_locally
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.http.resolve import resolve

RESOLVE_S = 5.0

# Addresses for documentation (RFC 5737, RFC 3849). No host has them, so only the default route can lead to them.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class NoAddress(Exception):
    """No address was found. The message says why. A later try may succeed."""


class AddressUnclear(Exception):
    """Several addresses are possible, and the user has to choose. The message says how."""


class Owner(Enum):
    """The host that a name means."""

    THIS_HOST = "this host"
    OTHER_HOST = "another host"
    SEVERAL_HOSTS = "several hosts, this one among them"


def owner_of(host: str, wait_s: float = RESOLVE_S) -> Owner:
    """The host that `host` means. It is this host if all its addresses can be bound here. Raises NoAddress.

    A name with addresses of several hosts (round robin) belongs to no single host: two hosts would each serve a store.
    """
    ours = {can_be_bound(address) for address in addresses(host, wait_s)}
    return Owner.SEVERAL_HOSTS if len(ours) > 1 else Owner.THIS_HOST if True in ours else Owner.OTHER_HOST


def addresses(host: str, wait_s: float = RESOLVE_S) -> list[str]:
    """The addresses of `host`, the preferred one first. Raises NoAddress.

    Without those that no connection from here can use: /etc/hosts has `::1 localhost` also where IPv6 is switched off.
    """
    try:
        found = resolve(host, 0, wait_s)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise NoAddress(f"the name {host} has no address here ({why})") from None
    listed = list(dict.fromkeys(_text(address) for _, address in found))
    return [address for address in listed if _is_usable(address)] or listed


def _is_usable(address: str) -> bool:
    if ":" not in address:
        return True
    return can_be_bound(address) if is_loopback(address) else any(own.version == 6 for _, own in by_interface())


def can_be_bound(address: str) -> bool:
    """Whether `address` is an address of this host."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def own_address(endpoints: Sequence[Endpoint], wait_s: float = RESOLVE_S) -> str:
    """The address of this host from which the kernel would reach `endpoints`: the first one that has a route.

    Raises NoAddress. Raises AddressUnclear if an endpoint's name is a loopback address here, and this host has several
    other addresses.
    """
    troubles: list[str] = []
    for endpoint in endpoints:
        try:
            found = addresses(endpoint.host, wait_s)
        except NoAddress as error:
            troubles.append(str(error))
            continue
        # This host may resolve its own name to 127.0.1.1 only. Other nodes know another address.
        if all(is_loopback(address) for address in found) and not is_meant_locally(endpoint.host):
            return _routable(endpoint.host) or found[0]
        for address in found:
            if source := _source(address):
                return source
        troubles.append(f"there is no route to {endpoint.host} ({', '.join(found)})")
    raise NoAddress("; ".join(troubles))


def routable_addresses() -> list[str]:
    """This host's addresses that other nodes may know: the default route's, else one of each interface that is up."""
    found = [source for _, elsewhere in _ELSEWHERE if (source := _source(elsewhere)) and not is_loopback(source)]
    # IPv4 comes first: every network understands it.
    return found[:1] or _of_interfaces()


def _routable(host: str) -> str | None:
    """The address that other nodes may know; None if this host has no network. Raises AddressUnclear."""
    found = routable_addresses()
    if len(found) > 1:
        raise AddressUnclear(
            f"{host} is a loopback address here, and this host has several other addresses ({', '.join(found)});"
            " say with --local-addr which one the other nodes reach"
        )
    return found[0] if found else None


def _source(address: str) -> str | None:
    """The address from which the kernel would send to `address`; None without a route. Nothing is sent."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return _text(probe.getsockname())
    except OSError:
        return None


def _text(place: tuple[object, ...]) -> str:
    """The host part of a socket address. A link-local one keeps the interface on which it is valid."""
    address = str(place[0])
    if len(place) == 4 and place[3] and "%" not in address:
        with suppress(OSError):
            return f"{address}%{socket.if_indextoname(int(str(place[3])))}"
    return address


def _of_interfaces() -> list[str]:
    """The first address of each interface that other nodes may know: IPv4 addresses, else IPv6 ones."""
    old: dict[str, str] = {}
    new: dict[str, str] = {}
    for name, address in by_interface():
        if not (address.is_loopback or address.is_link_local):
            (old if address.version == 4 else new).setdefault(name, str(address))
    return [*old.values()] or [*new.values()]
