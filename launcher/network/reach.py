"""Which address of this host the other nodes reach, and whether a name means this host.

Nothing is taken from the host's own name: it may be known to nobody else, or to itself as 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

from elaunch.launcher.network.interfaces import by_interface
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.http.resolve import resolve

RESOLVE_S = 5.0

# Documentation's own (RFC 5737, RFC 3849): nobody has them, so they are reached by the default route if at all.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class NoAddress(Exception):
    """An address is not to be had now; the message says why. A name may be known a moment later."""


class AddressUnclear(Exception):
    """A person has to say which address it is; the message says how."""


class Whose(Enum):
    """The host that a name means."""

    OURS = "this host"
    ANOTHERS = "another host"
    SEVERAL = "several hosts, this one among them"


def whose(host: str, wait_s: float = RESOLVE_S) -> Whose:
    """Whether `host` means this host: all its addresses can be bound here. Raises NoAddress.

    A name with addresses of several hosts (round robin) is nobody's: two of them would each serve a store.
    """
    ours = {can_be_bound(address) for address in addresses(host, wait_s)}
    return Whose.SEVERAL if len(ours) > 1 else Whose.OURS if True in ours else Whose.ANOTHERS


def addresses(host: str, wait_s: float = RESOLVE_S) -> list[str]:
    """The addresses that `host` stands for, the preferred first. Raises NoAddress."""
    try:
        found = resolve(host, 0, wait_s)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise NoAddress(f"the name {host} has no address here ({why})") from None
    return list(dict.fromkeys(_text(address) for _, address in found))


def can_be_bound(address: str) -> bool:
    """Whether `address` is one of this host's."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def own_address(endpoints: Sequence[Endpoint], wait_s: float = RESOLVE_S) -> str:
    """The address of this host that reaches the first of `endpoints` that can be reached.

    Raises NoAddress, and AddressUnclear on a host that knows itself by a loopback address only and has several others.
    """
    troubles: list[str] = []
    for endpoint in endpoints:
        try:
            found = addresses(endpoint.host, wait_s)
        except NoAddress as error:
            troubles.append(str(error))
            continue
        # By name this host may know itself as 127.0.1.1 only, and the others know it as something else.
        if all(is_loopback(address) for address in found) and not is_meant_locally(endpoint.host):
            return _routable(endpoint.host) or found[0]
        for address in found:
            if source := _source(address):
                return source
        troubles.append(f"there is no route to {endpoint.host} ({', '.join(found)})")
    raise NoAddress("; ".join(troubles))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def routable_addresses() -> list[str]:
    """This host's addresses that others may know: the default route's, else one of each interface that is up."""
    found = [source for _, elsewhere in _ELSEWHERE if (source := _source(elsewhere)) and not is_loopback(source)]
    # Of two kinds, the older is understood everywhere.
    return found[:1] or _of_interfaces()


def _routable(host: str) -> str | None:
    """The one address that others may know; none where there is no network, and so nobody else."""
    found = routable_addresses()
    if len(found) > 1:
        raise AddressUnclear(
            f"{host} is a loopback address here, and this host has several others ({', '.join(found)});"
            " say which one the other nodes reach with --local-addr"
        )
    return found[0] if found else None


def is_meant_locally(host: str) -> bool:
    """Whether whoever wrote `host` meant loopback: then all nodes are agents of one host."""
    is_named = host == "localhost" or host.endswith(".localhost")
    return is_named or (is_address(host) and is_loopback(host))


def is_address(host: str) -> bool:
    """Whether `host` is an address, and no name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _source(address: str) -> str | None:
    """The address that the kernel would send from; nothing is sent."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return _text(probe.getsockname())
    except OSError:
        return None


def _text(place: tuple[object, ...]) -> str:
    """The address of a socket address; a link-local one keeps the interface that it is valid on."""
    address = str(place[0])
    if len(place) == 4 and place[3] and "%" not in address:
        with suppress(OSError):
            return f"{address}%{socket.if_indextoname(int(str(place[3])))}"
    return address


def _of_interfaces() -> list[str]:
    """The first address of each interface that others may know; IPv6 ones where there is no other."""
    old: dict[str, str] = {}
    new: dict[str, str] = {}
    for name, address in by_interface():
        if not (address.is_loopback or address.is_link_local):
            (old if address.version == 4 else new).setdefault(name, str(address))
    return [*old.values()] or [*new.values()]
