"""Finds what gloo, RPC and c10d must be told on a host whose own name leads nowhere, or whose DNS does not answer.

gloo takes the first address of the host's own name that it can bind (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
Debian's installer gives that name the address 127.0.1.1. If the name is unknown, gloo uses 127.0.0.1. No other node
reaches either. TensorPipe, which carries RPC, looks in the same way (torch/csrc/distributed/rpc/tensorpipe_agent.cpp).

For its log c10d asks for the name of each address that it connects to (torch/csrc/distributed/c10d/socket.cpp). With a
DNS server that does not answer, each such question takes ten seconds at each start of the workers.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from elaunch.launcher.network.interfaces import by_interface
from elaunch.launcher.network.reach import NoAddress, addresses, can_be_bound
from elaunch.rendezvous.addresses import is_loopback

VARIABLE = "GLOO_SOCKET_IFNAME"
RPC_VARIABLE = "TP_SOCKET_IFNAME"
# glibc's default is two tries of 5 s for each server (resolv.conf(5)).
RESOLVER_VARIABLE, _SOONER = "RES_OPTIONS", "timeout:1 attempts:2"
# gloo in the worker asks the same resolver the same question, and waits for the answer.
_RESOLVE_S = 1.0


def socket_variables(
    address: str, environ: Mapping[str, str], say: Callable[[str], None], *, verbose: bool
) -> dict[str, str]:
    """The variables that tell gloo and RPC of the interface of `address`, if they would not find it or wait for long.

    And one that has the resolver give up sooner, if it does not answer c10d's question in time. The user's own in
    `environ` stay. What costs no time, as Debian's 127.0.1.1, is no news if not `verbose`.
    """
    # Both questions at once.
    asked_s = time.monotonic()
    c10d = threading.Thread(target=_name_of, args=(address,), daemon=True)
    c10d.start()
    unset = [name for name in (VARIABLE, RPC_VARIABLE) if name not in environ]
    found = gloo_interface(address) if unset else None
    variables = {}
    if found:
        interface, why = found
        variables = dict.fromkeys(unset, interface)
        if VARIABLE in unset and (verbose or is_loopback(address)):
            say(f"{VARIABLE}={interface} is set for the workers: {why}")
    c10d.join(max(0.0, asked_s + _RESOLVE_S - time.monotonic()))
    if c10d.is_alive() and RESOLVER_VARIABLE not in environ:
        variables[RESOLVER_VARIABLE] = _SOONER
        say(
            f"{RESOLVER_VARIABLE}='{_SOONER}' is set for the workers: the lookup of the name of {address} takes more"
            f" than {_RESOLVE_S:g} s (does the DNS server answer?), and torch waits for it at each start"
        )
    return variables


def _name_of(address: str) -> None:
    plain = address.partition("%")[0]
    with suppress(OSError):
        # c10d connects from an IPv6 socket, also to IPv4. /etc/hosts does not have these forms.
        socket.getnameinfo((plain if ":" in plain else f"::ffff:{plain}", 0), socket.NI_NUMERICSERV)


def gloo_interface(address: str) -> tuple[str, str] | None:
    """The interface of `address`, at which other nodes reach this host, and why gloo would not find it.

    None if gloo finds it. If all nodes are on this host gloo finds it too, but waits for a resolver that is slow.
    """
    name, asked_s = socket.gethostname(), time.monotonic()
    try:
        own = next((each for each in addresses(name, _RESOLVE_S) if can_be_bound(each)), None)
    except NoAddress:
        own = None
    if is_loopback(address):
        is_slow = own is None and time.monotonic() - asked_s >= _RESOLVE_S
        interface = interface_of(address) if is_slow else None
        why = f"the lookup of this host's own name, {name}, takes more than {_RESOLVE_S:g} s, and gloo waits for it"
        return (interface, why) if interface else None
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
