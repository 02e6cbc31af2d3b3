"""The network interface that gloo has to be told of, on a host that does not know itself by an address of the network.

gloo takes the first address of the host's own name that it can bind (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
Debian's installer makes that 127.0.1.1, and where the name is unknown it is 127.0.0.1: no other node reaches either.
"""

from __future__ import annotations

import ipaddress
import socket

from elaunch.launcher.network.interfaces import by_interface
from elaunch.launcher.network.reach import NoAddress, addresses, can_be_bound, is_loopback

VARIABLE = "GLOO_SOCKET_IFNAME"
# The worker asks the same resolver the same, and waits for it.
_RESOLVE_S = 1.0


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
    return scope or next((name for name, found in by_interface() if found == wanted), None)
