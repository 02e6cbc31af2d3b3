"""Finds the network interface for gloo and RPC on a host whose own name leads to no address that other nodes reach.

gloo takes the first address of the host's own name that it can bind (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
Debian's installer gives that name the address 127.0.1.1. If the name is unknown, gloo uses 127.0.0.1. No other node
reaches either. TensorPipe, which carries RPC, looks in the same way (torch/csrc/distributed/rpc/tensorpipe_agent.cpp).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping

from elaunch.launcher.network.interfaces import by_interface
from elaunch.launcher.network.reach import NoAddress, addresses, can_be_bound
from elaunch.rendezvous.addresses import is_loopback

VARIABLE = "GLOO_SOCKET_IFNAME"
RPC_VARIABLE = "TP_SOCKET_IFNAME"
# gloo in the worker asks the same resolver the same question, and waits for the answer.
_RESOLVE_S = 1.0


def socket_variables(address: str, environ: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """The variables that tell gloo and RPC of the interface of `address`, if they would not find it.

    The user's own in `environ` stay.
    """
    unset = [name for name in (VARIABLE, RPC_VARIABLE) if name not in environ]
    found = gloo_interface(address) if unset else None
    if found is None:
        return {}
    interface, why = found
    if VARIABLE in unset:
        say(f"{VARIABLE}={interface} is set for the workers: {why}")
    return dict.fromkeys(unset, interface)


def gloo_interface(address: str) -> tuple[str, str] | None:
    """The interface of `address`, at which other nodes reach this host, and why gloo would not find it.

    None if gloo finds it, or if all nodes are on this host.
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
    why = (
        f"this host resolves its own name, {name}, to {own}" if own else f"this host's own name, {name}, has no address"
    )
    return (interface, why) if interface else None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address` (IPv4 or IPv6); None if none has it."""
    plain, _, scope = address.partition("%")
    wanted = ipaddress.ip_address(plain)
    return scope or next((name for name, found in by_interface() if found == wanted), None)
