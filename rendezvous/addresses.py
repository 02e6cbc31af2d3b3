"""What a host's name or address says by itself: nothing is looked up."""

from __future__ import annotations

import ipaddress


def is_address(host: str) -> bool:
    """Whether `host` is an address and not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_unspecified(address: str) -> bool:
    """Whether it means all addresses of a host (0.0.0.0): a connection to it stays on this host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def is_meant_locally(host: str) -> bool:
    """Whether `host` is written as loopback. If it is, all agents of the job are on one host."""
    is_named = host == "localhost" or host.endswith(".localhost")
    return is_named or (is_address(host) and is_loopback(host))
