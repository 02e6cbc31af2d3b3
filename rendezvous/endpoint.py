"""Where a store listens, its protocol, the credentials of a client, and what follows from an address alone."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from elaunch.rendezvous.store import Denied

if TYPE_CHECKING:
    # Importing ssl takes ten milliseconds, and only TLS needs it.
    import ssl

# The keys of a job begin with this unless etcd_prefix is given.
PREFIX = "/elaunch/"


class Transport(Enum):
    """The wire protocol to the store."""

    GATEWAY = "gateway"  # etcd's JSON over HTTP, the only one of elaunch's own server
    GRPC = "grpc"  # needs elaunch[etcd3]


@dataclass(frozen=True)
class Endpoint:
    """Where a store listens. `host` is a name or an address, IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Tls:
    """Certificate files for a real etcd with https. Without `ca` the system's certificate authorities are trusted."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class Login:
    """A user of a real etcd."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Access:
    """The credentials of a client, and how they are sent.

    Without `tls` the connection is not encrypted. An SSLContext is the one made from the job's token, for elaunch's own
    served store. `login` is a user of etcd; the served store requires `bearer`. `plainly`: http:// was typed, so the
    login may be sent without TLS. The job's keys begin with `prefix`; only messages about permissions use it. Raises
    ValueError for a bearer without the SSLContext made from the same token.
    """

    tls: Tls | ssl.SSLContext | None = None
    login: Login | None = None
    bearer: str = field(default="", repr=False)
    plainly: bool = False
    prefix: str = PREFIX

    def __post_init__(self) -> None:
        if self.bearer and (self.tls is None or isinstance(self.tls, Tls)):
            raise ValueError("a bearer goes only to the store whose certificate is made from the same token")

    def check_login(self, endpoint: Endpoint) -> None:
        """Call this before the login is sent. Raises Denied if the login would be sent unencrypted."""
        if self.login and self.tls is None and not self.plainly:
            raise Denied(
                f"the store at {endpoint} is reached without TLS, so the password of etcd's user {self.login.user} is"
                f" not sent; {how_to_send(endpoint)}"
            )


def how_to_send(*endpoints: object) -> str:
    """The way out for the user: how to type these endpoints so that a password is sent to them."""
    safely, plainly = (",".join(f"{scheme}://{each}" for each in endpoints) for scheme in ("https", "http"))
    return f"type {safely}, or type {plainly} to send it unencrypted"


def is_address(host: str) -> bool:
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
