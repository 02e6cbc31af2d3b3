"""The address at which the other ranks reach this process."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 40
_ADDRESS_AT = 20
_IF_INET6 = Path("/proc/net/if_inet6")
# Addresses for documentation (RFC 5737, RFC 3849): the route to them is the one to everywhere. Nothing is sent.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def own_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names, else the one by which it reaches MASTER_ADDR.

    On the first node a name in MASTER_ADDR may mean a loopback address (127.0.1.1 in Debian's /etc/hosts). Ranks on
    other nodes cannot use that, so it is the address by which this host reaches other networks, or its only one.
    Without MASTER_ADDR the host's own name is taken in its place. Raises OSError for an interface without an address,
    for a MASTER_ADDR that nobody knows, and if this host has several addresses to choose from.
    """
    if names := environ.get(_INTERFACE, ""):
        # gloo takes several, separated by commas.
        return _of_interface(names.split(",")[0])
    if master := environ.get("MASTER_ADDR", ""):
        found = _towards(master, int(environ.get("MASTER_PORT") or 1))
    else:
        master = socket.gethostname()
        found = "127.0.0.1"
        with contextlib.suppress(OSError):
            found = _towards(master, 1)
    if _is_loopback(found) and not _is_loopback(master) and not _is_alone(environ):
        return _outward(master, found) or found
    return found


def _is_loopback(host: str) -> bool:
    """Whether this means the loopback on every host; another name may mean it on its own host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_alone(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host, as their launcher says. Without a launcher nobody knows."""
    here = environ.get("LOCAL_WORLD_SIZE", "")
    return bool(here) and here == environ.get("WORLD_SIZE", "")


def _towards(host: str, port: int) -> str:
    """The address that packets to `host` come from. None is sent."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asked:
            asked.connect(place)
            return str(asked.getsockname()[0])
    except OSError as error:
        raise OSError(
            f"this host finds no way to {host} ({error.strerror}), so the other ranks cannot reach this one; "
            f"{_INTERFACE}=… names the interface to use"
        ) from error


def _outward(name: str, loopback: str) -> str:
    """The address of the default route, or the only one that is not a loopback's; empty if this host has none."""
    for somewhere in _ANYWHERE:
        with contextlib.suppress(OSError):
            return _towards(somewhere, 1)
    found: dict[str, str] = {}
    for _, interface in socket.if_nameindex():
        with contextlib.suppress(OSError):
            address = _of_interface(interface)
            if not _is_loopback(address):
                found[interface] = address
    if len(found) > 1:
        raise OSError(
            f"{name} means {loopback} on this host, where no other node reaches it, and the host has several addresses "
            f"({', '.join(f'{address} on {interface}' for interface, address in found.items())}); "
            f"{_INTERFACE}=… names the interface to use"
        )
    return next(iter(found.values()), "")


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        request = struct.pack(f"{_IFREQ_BYTES}s", name.encode()[:15])
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntop(socket.AF_INET, answer[_ADDRESS_AT : _ADDRESS_AT + 4])
    for line in _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else ():
        raw, _, _, _, _, interface = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(raw))
        if interface == name and not address.is_link_local:
            return str(address)
    raise OSError(f"{_INTERFACE} is {name}, and this host has no address on an interface of that name")
