"""The network interface that gloo has to be told of, on a host that does not know itself by an address of the network.

gloo takes the first address of the host's own name that it can bind (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
Debian's installer makes that 127.0.1.1, and where the name is unknown it is 127.0.0.1: no other node reaches either.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from elaunch.launcher.reach import NoAddress, addresses, can_be_bound, is_loopback

VARIABLE = "GLOO_SOCKET_IFNAME"
# The worker asks the same resolver the same, and waits for it.
_RESOLVE_S = 1.0
_SIOCGIFCONF = 0x8912
# struct ifreq on 64 bits: a name of 16 bytes, then a socket address with the four bytes of IPv4 at 4.
_IFREQ_BYTES, _IFNAME_BYTES, _IPV4_AT = 40, 16, 20
_INTERFACES_MAX = 1024


def gloo_interface(address: str) -> tuple[str, str] | None:
    """The interface that has `address`, this host's toward the other nodes, and why gloo would not find it by itself.

    None where it would, or where the others are on this host, too.
    """
    if is_loopback(address):
        return None
    name = socket.gethostname()
    try:
        own = next((each for each in addresses(name, _RESOLVE_S) if can_be_bound(each)), None)
    except NoAddress:
        own = None
    if own and not is_loopback(own):
        return None
    interface = interface_of(address)
    why = f"this host's name, {name}, means {own} to itself" if own else f"nobody here knows this host's name, {name}"
    return (interface, why) if interface else None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, an IPv4 or IPv6 one."""
    plain, _, scope = address.partition("%")
    wanted = ipaddress.ip_address(plain)
    return scope or next((name for name, found in (*_ipv4(), *_ipv6()) if found == wanted), None)


def _ipv4() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    room = array.array("B", bytes(_IFREQ_BYTES * _INTERFACES_MAX))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        place, size = room.buffer_info()
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, struct.pack("iL", size, place))
    filled = struct.unpack("iL", answer)[0]
    for start in range(0, filled, _IFREQ_BYTES):
        entry = room[start : start + _IFREQ_BYTES].tobytes()
        name = entry[:_IFNAME_BYTES].partition(b"\0")[0].decode()
        # A second address may have a label of its own, eth0:1.
        yield name.partition(":")[0], ipaddress.IPv4Address(entry[_IPV4_AT : _IPV4_AT + 4])


def _ipv6(table: Path = Path("/proc/net/if_inet6")) -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    """Columns: address, interface, prefix length, scope, flags, name."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return
    for row in rows:
        yield row[5], ipaddress.IPv6Address(int(row[0], 16))
