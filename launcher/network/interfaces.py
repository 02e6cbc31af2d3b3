"""The addresses of this host's network interfaces, as the kernel lists them."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFCONF = 0x8912
# struct ifreq on 64 bits: a name of 16 bytes, then a socket address, whose bytes 4 to 7 are the IPv4 address.
_IFREQ_BYTES, _IFNAME_BYTES, _IPV4_AT = 40, 16, 20
_INTERFACES_MAX = 1024


def by_interface() -> Iterator[tuple[str, IpAddress]]:
    """Pairs of an interface's name and one of its addresses. The IPv4 addresses come first."""
    yield from _ipv4()
    yield from _ipv6()


def _ipv4() -> Iterator[tuple[str, IpAddress]]:
    room = array.array("B", bytes(_IFREQ_BYTES * _INTERFACES_MAX))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        place, size = room.buffer_info()
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, struct.pack("iL", size, place))
    filled = struct.unpack("iL", answer)[0]
    for start in range(0, filled, _IFREQ_BYTES):
        entry = room[start : start + _IFREQ_BYTES].tobytes()
        name = entry[:_IFNAME_BYTES].partition(b"\0")[0].decode()
        # A second address may have its own label, for example eth0:1.
        yield name.partition(":")[0], ipaddress.IPv4Address(entry[_IPV4_AT : _IPV4_AT + 4])


def _ipv6(table: Path = Path("/proc/net/if_inet6")) -> Iterator[tuple[str, IpAddress]]:
    """Columns: address, interface, prefix length, scope, flags, name."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return
    for row in rows:
        yield row[5], ipaddress.IPv6Address(int(row[0], 16))
