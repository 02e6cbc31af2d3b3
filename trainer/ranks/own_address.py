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


def own_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names, else the one by which it reaches MASTER_ADDR.

    Without MASTER_ADDR it is the address of the host's own name, and of a host without one that of the loopback.
    Raises OSError for an interface without an address, and for a MASTER_ADDR that nobody knows.
    """
    if names := environ.get(_INTERFACE, ""):
        # gloo takes several, separated by commas.
        return _of_interface(names.split(",")[0])
    if master := environ.get("MASTER_ADDR", ""):
        return _towards(master, int(environ.get("MASTER_PORT") or 1))
    with contextlib.suppress(OSError):
        return _towards(socket.gethostname(), 1)
    return "127.0.0.1"


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
