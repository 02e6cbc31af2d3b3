"""Endpoints as a user types them: `host0`, `host0:2379`, `[::1]:2379`, `https://a:2379,https://b:2379`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from elaunch.launcher.options.values import PORT_MAX, Raw, names

# Variables with the store's address. The first one that is set wins.
PLACES = ("ELAUNCH_ENDPOINT", "ETCDCTL_ENDPOINTS")
_HOW = "use HOST:PORT, [IPV6]:PORT or https://HOST:PORT, several separated by commas"
# Ports below this one belong to the system: neither an etcd nor a head listens there.
_PORT_MIN = 1024


@dataclass(frozen=True)
class Address:
    """One endpoint. `scheme` is http, https or empty. `port` is None if it was left out. `host` has no brackets."""

    scheme: str
    host: str
    port: int | None

    def __str__(self) -> str:
        scheme = f"{self.scheme}://" if self.scheme else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}{host}" if self.port is None else f"{scheme}{host}:{self.port}"


def endpoints(raw: Raw) -> tuple[Address, ...]:
    """Converts a comma list of endpoints; an empty list has none. Raises ValueError as the functions of `values` do."""
    return tuple(_address(word) for word in names(raw))


def _address(word: str) -> Address:
    scheme, separator, rest = word.rpartition("://")
    if separator and scheme not in ("http", "https"):
        raise ValueError(f"has the scheme {scheme}, and elaunch knows only http and https; {_HOW}")
    rest = rest.removesuffix("/")
    # An IPv6 address without brackets cannot have a port. It has "::" in it, or seven colons.
    bare = re.fullmatch(r"(?=.*::|(?:[^:]*:){7})[0-9A-Fa-f:.]+(%[\w.-]+)?", rest)
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+))(?::([0-9]{1,5}))?", rest)
    if bare:
        _check_brackets(rest)
        return Address(scheme, rest, None)
    if not found:
        raise ValueError(f"is no endpoint; {_HOW}")
    port = int(found[3]) if found[3] else None
    if port is not None and port > PORT_MAX:
        raise ValueError(f"has the port {port}, and the last port is {PORT_MAX}")
    return Address(scheme, found[1] or found[2], port)


def _check_brackets(bare: str) -> None:
    """Raises ValueError for an IPv6 address whose last group is probably meant as a port: `fd00::7:2379`."""
    host, _, last = bare.rpartition(":")
    if re.fullmatch(r"[0-9]{4,5}", last) and _PORT_MIN <= int(last) <= PORT_MAX:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            # Without its last group it is no address (`fd00::2379`), so the group is not a port.
            return
        raise ValueError(
            f"may have a port at its end, or not; use brackets: [{host}]:{last} for a port, [{bare}] without one"
        )
