"""How the ranks of a process group find each other: by the group's store, each at the address that others reach."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import operator
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_INTERFACE = "GLOO_SOCKET_IFNAME"
# Addresses for documentation (RFC 5737, RFC 3849): the route to them is the one to everywhere. Nothing is sent.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True)
class StoreContacts:
    """Where the ranks of a channel listen, in the store by which the job's process group was made.

    torchrun's agent keeps all keys at a restart, and nothing that it tells its workers names one. So a contact may be
    that of the process that was this rank before.

    Everybody who reaches MASTER_PORT can read that store. So under elaunch it holds no secret as it is: the agents have
    given one to all ranks of the generation.
    """

    channel: str

    def own_address(self) -> str:
        """The address at which the others reach this process. Raises OSError."""
        return own_address(os.environ)

    def publish(self, rank: int, content: bytes) -> None:
        """Write the contact of this rank, in place of an older one."""
        key = f"{self.channel}/{rank}"
        _store().set(key, _masked(key, content))

    def find(self, rank: int) -> bytes | None:
        """The newest contact of this rank; None if there is none yet. Does not wait; may raise RuntimeError."""
        # Not `wait` with a limit: torch prints two warnings whenever its time is over.
        key = f"{self.channel}/{rank}"
        return _masked(key, bytes(_store().get(key))) if _store().check([key]) else None


def _masked(key: str, contact: bytes) -> bytes:
    """The contact with its secret, which comes first, masked by a pad for this key; masking it again reveals it."""
    given = os.environ.get("ELAUNCH_GENERATION_SECRET", "")
    pad = hmac.digest(given.encode(), key.encode(), "sha256") if given else b""
    return bytes(map(operator.xor, contact, pad)) + contact[len(pad) :]


def _store() -> Any:
    # torch has no public name for it; this one has been in every release since 1.8.
    return dist.distributed_c10d._get_default_store()


def own_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that GLOO_SOCKET_IFNAME names, else the one by which it reaches MASTER_ADDR.

    On the first node a name in MASTER_ADDR may mean a loopback address (127.0.1.1 in Debian's /etc/hosts). Ranks on
    other nodes cannot use that, so it is the address by which this host reaches other networks. Without MASTER_ADDR
    the host's own name is taken in its place. Raises OSError for an interface without an address, and for a
    MASTER_ADDR that nobody knows.
    """
    if names := environ.get(_INTERFACE, ""):
        # gloo takes several, separated by commas.
        return _of_interface(names.split(",")[0])
    master = environ.get("MASTER_ADDR", "")
    try:
        found = _towards(master or socket.gethostname())
    except OSError as error:
        if master:
            raise OSError(
                f"this host finds no way to {master} ({error.strerror}), so the other ranks cannot reach this one; "
                f"{_INTERFACE}=… names the interface to use"
            ) from error
        found = "127.0.0.1"
    here = environ.get("LOCAL_WORLD_SIZE", "")
    is_alone = bool(here) and here == environ.get("WORLD_SIZE", "")
    if _is_loopback(found) and not _is_loopback(master) and not is_alone:
        for somewhere in _ANYWHERE:
            with contextlib.suppress(OSError):
                return _towards(somewhere)
    return found


def _is_loopback(host: str) -> bool:
    """Whether this means the loopback on every host; another name may mean it on its own host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _towards(host: str) -> str:
    """The address that packets to `host` come from. None is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asked:
        asked.connect(place)
        return str(asked.getsockname()[0])


def _of_interface(name: str) -> str:
    # Few jobs name one.
    import psutil

    found = psutil.net_if_addrs().get(name, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in found:
            if each.family == family and not each.address.startswith("fe80:"):
                return str(each.address)
    raise OSError(f"{_INTERFACE} is {name}, and this host has no address on an interface of that name")
