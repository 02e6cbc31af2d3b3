"""The port of the worker store, reserved before anybody is told of it."""

from __future__ import annotations

import errno
import socket

from elaunch.agent.config import AgentConfig
from elaunch.rendezvous.addresses import is_loopback

_OWN_ADDRESS = "give one of this host's with --master-addr, or leave it out"


class NoPort(Exception):
    """The worker store cannot listen on the wanted address or port. The message says why, and the way out."""


class MasterPort:
    """The port of this node's next worker store, reserved by a socket that listens on it."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._listener: socket.socket | None = None

    def reserve(self) -> int:
        """The reserved port. If none is reserved, reserve one. Raises NoPort."""
        self._listener = self._listener or reserve(self._config)
        return int(self._listener.getsockname()[1])

    @property
    def listener(self) -> socket.socket | None:
        """The socket, for a worker store to take over."""
        return self._listener

    def release(self) -> None:
        """The worker store has the socket now: close it here. A single port that the user chose stays reserved."""
        if len(self._config.master_ports) != 1:
            self.close()

    def close(self) -> None:
        """Let another process bind the port."""
        if self._listener:
            self._listener.close()
        self._listener = None


def reserve(config: AgentConfig) -> socket.socket:
    """A socket that listens on one of the config's master ports, or on a free port. No other process can take the port.

    Raises NoPort if the wanted ports are taken, or the address is not this host's.
    """
    try:
        # Not as text: Python would load its codec for names with other characters.
        name = config.master_addr.encode() if config.master_addr.isascii() else config.master_addr
        family, _, _, _, address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise NoPort(f"the address {config.master_addr} is unknown ({error.strerror}); {_OWN_ADDRESS}") from error
    host = str(address[0])
    if _is_known_to_itself_only(config, host):
        # Listen for IPv6 and IPv4, or only for IPv4 on a host without IPv6.
        family, host = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    for port in config.master_ports or (0,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # The next generation may use the same port while the kernel still keeps old connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise NoPort(
                    f"{config.master_addr} is no address of this host ({error.strerror}); {_OWN_ADDRESS}"
                ) from error
            continue
        return listener
    ports = config.master_ports
    wanted = f"port {ports[0]} is" if len(ports) == 1 else f"ports {ports[0]}–{ports[-1]} are all"
    raise NoPort(f"{wanted} in use on {config.master_addr}; choose others with --master-port FIRST:LAST")


def _is_known_to_itself_only(config: AgentConfig, host: str) -> bool:
    """Whether this host knows MASTER_ADDR by a loopback address (Debian's 127.0.1.1) that no other node can mean."""
    is_name = config.master_addr not in (host, "localhost")
    return config.spec.nodes_max > 1 and is_name and is_loopback(host)
