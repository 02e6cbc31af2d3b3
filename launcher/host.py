"""This host: its CPUs, cores and GPUs, its addresses, and the interface that gloo and RPC must be given.

torch is not imported. The host's own name is not used as its address: other hosts may not know it, and this host
may resolve it to 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from elaunch.agent.linux import text_of
from elaunch.agent.own_lines import can_move_cursor, is_one_terminal
from elaunch.agent.workers.topology import KINDS, read_gpus, visible
from elaunch.launcher.errors import UsageError
from elaunch.rendezvous.dial import resolve
from elaunch.rendezvous.endpoint import Endpoint, is_loopback, is_meant_locally

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_RESOLVE_S = 5.0
# gloo in the worker queries the same resolver, and waits for it.
_OWN_NAME_S = 1.0
# Addresses for documentation (RFC 5737, RFC 3849). No host has them, so only the default route can lead to them.
_UNROUTED = ("192.0.2.1", "2001:db8::1")
_GLOO, _RPC = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
# glibc's default is two tries of 5 s for each server (resolv.conf(5)).
_RESOLVER, _TIMEOUT = "RES_OPTIONS", "timeout:1 attempts:2"


@dataclass(frozen=True)
class HostResources:
    """The resources of this host.

    `cpus` counts the logical CPUs in this process's affinity, `cores` the physical cores within its CPU quota.
    `kinds` has the number of GPUs of the requested one of `KINDS`.
    `columns` is the width of the terminal that shows this process's stdout and stderr, 0 without one.
    `python` is this process's interpreter. `python_options` are its options that workers inherit.
    """

    cpus: int
    cores: int
    gpus: int
    python: str
    python_options: tuple[str, ...] = ()
    columns: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)


def detect(environ: Mapping[str, str], requested: int | str | None = None, root: Path = Path("/")) -> HostResources:
    """Read the host's resources. Variables in `environ` may hide GPUs; `requested` may be one of `KINDS`."""
    allowed = os.sched_getaffinity(0)
    topology = root / "sys/devices/system/cpu"
    # Threads of one core have the same siblings.
    cores = len({text_of(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed})
    quota = read_quota_cpus(root)
    return HostResources(
        cpus=len(allowed),
        cores=max(1, cores if quota is None else min(cores, int(quota))),
        gpus=len(visible(read_gpus(root), environ)),
        python=sys.executable,
        python_options=interpreter_options(),
        columns=shutil.get_terminal_size().columns if is_one_terminal(1, 2) and can_move_cursor(1) else 0,
        kinds={kind: len(visible(read_gpus(root, kind), environ)) for kind in KINDS if kind == requested},
    )


def environ_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the LC_CTYPE that this process was started with. In a C locale Python changes it (PEP 538)."""
    found = {name: value for name, value in environ.items() if name != "LC_CTYPE"}
    for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"LC_CTYPE="):
            found["LC_CTYPE"] = os.fsdecode(entry.partition(b"=")[2])
    return found


def interpreter_options() -> tuple[str, ...]:
    """This interpreter's options that workers inherit: -W, -X, -O, -B and -b, also from their variables.

    Options that isolate the interpreter (-E, -I, -P, -s, -S) are not inherited: installers write them into the first
    line of a command.
    """
    valued = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    flags = {"O": sys.flags.optimize, "b": sys.flags.bytes_warning, "B": sys.flags.dont_write_bytecode}
    counted = [f"-{letter * count}" for letter, count in flags.items() if count]
    return (*(f"-W{word}" for word in sys.warnoptions), *valued, *counted)


def read_quota_cpus(root: Path = Path("/")) -> float | None:
    """The lowest CPU limit of this process's cgroup (v2) and those above it; None without a limit.

    `cpu.max` has "QUOTA PERIOD" in microseconds, or "max PERIOD" without a limit.
    """
    path = next((line[3:] for line in text_of(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    base = root / "sys/fs/cgroup"
    # If the container does not see its own path, the root of its mount is its cgroup.
    own = base / path.lstrip("/")
    limits = [text_of(folder / "cpu.max").split() for folder in (own, *own.parents) if folder.is_relative_to(base)]
    return min((int(each[0]) / int(each[1]) for each in limits if len(each) == 2 and each[0] != "max"), default=None)


class NoAddress(Exception):
    """No address was found. The message has the reason. A retry may succeed."""


class Owner(Enum):
    """The host that a name refers to."""

    THIS_HOST = "this host"
    OTHER_HOST = "another host"
    SEVERAL_HOSTS = "several hosts, this one among them"


def owner_of(host: str, wait_s: float = _RESOLVE_S) -> Owner:
    """The host that `host` means. It is this host if all its addresses can be bound here. Raises NoAddress.

    A name with addresses of several hosts (round robin) belongs to no single host: two hosts would each serve a store.
    """
    ours = {can_be_bound(address) for address in addresses(host, wait_s)}
    return Owner.SEVERAL_HOSTS if len(ours) > 1 else Owner.THIS_HOST if True in ours else Owner.OTHER_HOST


def addresses(host: str, wait_s: float = _RESOLVE_S) -> list[str]:
    """The addresses of `host`, the preferred one first. Raises NoAddress.

    Unusable ones are left out, unless all are: /etc/hosts has `::1 localhost` also where IPv6 is disabled.
    """
    try:
        found = resolve(host, 0, wait_s)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise NoAddress(f"the name {host} has no address here ({why})") from None
    listed = list(dict.fromkeys(_host_of(address) for _, address in found))
    return [address for address in listed if _is_usable(address)] or listed


def _is_usable(address: str) -> bool:
    if ":" not in address:
        return True
    return can_be_bound(address) if is_loopback(address) else any(own.version == 6 for _, own in by_interface())


def socket_address(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The family of a numeric address, and what bind() and connect() take for it. Raises OSError."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return found[0], found[4]


def can_be_bound(address: str) -> bool:
    try:
        family, sockaddr = socket_address(address, 0)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(sockaddr)
    except (OSError, ValueError):
        return False
    return True


def own_address(endpoints: Sequence[Endpoint], wait_s: float = _RESOLVE_S) -> str:
    """The address of this host from which the kernel would reach `endpoints`: the first one that has a route.

    Raises NoAddress, and UsageError if an endpoint's name is a loopback address here, and this host has several other
    addresses.
    """
    problems: list[str] = []
    for endpoint in endpoints:
        try:
            found = addresses(endpoint.host, wait_s)
        except NoAddress as error:
            problems.append(str(error))
            continue
        # This host may resolve its own name to 127.0.1.1 only. Other nodes know another address.
        if all(is_loopback(address) for address in found) and not is_meant_locally(endpoint.host):
            routable = routable_addresses()
            if len(routable) > 1:
                raise UsageError(
                    f"{endpoint.host} is a loopback address here, and this host has several other addresses"
                    f" ({', '.join(routable)}); give the one that the other nodes reach with --local-addr"
                )
            return (routable or found)[0]
        for address in found:
            if source := _source(address):
                return source
        problems.append(f"there is no route to {endpoint.host} ({', '.join(found)})")
    raise NoAddress("; ".join(problems))


def routable_addresses() -> list[str]:
    """This host's addresses that other nodes may reach: the default route's, else one of each interface."""
    found = [source for unrouted in _UNROUTED if (source := _source(unrouted)) and not is_loopback(source)]
    # IPv4 comes first: every network supports it.
    if found:
        return found[:1]
    of_version: dict[int, dict[str, str]] = {4: {}, 6: {}}
    for name, address in by_interface():
        if not (address.is_loopback or address.is_link_local):
            of_version[address.version].setdefault(name, str(address))
    return [*(of_version[4] or of_version[6]).values()]


def _source(address: str) -> str | None:
    """The address from which the kernel would send to `address`; None without a route. Nothing is sent."""
    try:
        family, sockaddr = socket_address(address, 9)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)
            return _host_of(probe.getsockname())
    except OSError:
        return None


def _host_of(sockaddr: tuple[object, ...]) -> str:
    """The host part of a socket address. A link-local one keeps the interface on which it is valid."""
    address = str(sockaddr[0])
    if len(sockaddr) == 4 and sockaddr[3] and "%" not in address:
        with suppress(OSError):
            return f"{address}%{socket.if_indextoname(int(str(sockaddr[3])))}"
    return address


def by_interface() -> Iterator[tuple[str, IpAddress]]:
    """Pairs of an interface's name and one of its addresses. The IPv4 addresses come first."""
    import psutil  # Only jobs of several nodes need it.

    listed = [(name, each) for name, several in psutil.net_if_addrs().items() for each in several]
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, each in listed:
            if each.family == family:
                # A second address may have its own label, for example eth0:1.
                yield name.partition(":")[0], ipaddress.ip_address(each.address.partition("%")[0])


def gloo_variables(
    address: str, environ: Mapping[str, str], log: Callable[[str], None], *, verbose: bool
) -> dict[str, str]:
    """The variables that name the interface of `address` to gloo and RPC, if they would not find it or wait for long.

    And a shorter timeout of the resolver, if it does not answer c10d's query in time: c10d looks up the name of each
    address that it connects to (socket.cpp). Variables in `environ` are kept.
    """
    # Both lookups run in parallel.
    begun_s = time.monotonic()
    c10d = threading.Thread(target=_name_of, args=(address,), daemon=True)
    c10d.start()
    unset = [name for name in (_GLOO, _RPC) if name not in environ]
    variables: dict[str, str] = {}
    if unset and (found := gloo_interface(address)):
        interface, why = found
        variables = dict.fromkeys(unset, interface)
        if _GLOO in unset and (verbose or is_loopback(address)):
            log(f"{_GLOO}={interface} is set for the workers: {why}")
    c10d.join(max(0.0, begun_s + _OWN_NAME_S - time.monotonic()))
    if c10d.is_alive() and _RESOLVER not in environ:
        variables[_RESOLVER] = _TIMEOUT
        log(
            f"{_RESOLVER}='{_TIMEOUT}' is set for the workers: the lookup of the name of {address} takes more than"
            f" {_OWN_NAME_S:g} s (does the DNS server answer?), and torch waits for it at each start"
        )
    return variables


def _name_of(address: str) -> None:
    plain = address.partition("%")[0]
    with suppress(OSError):
        # c10d connects from an IPv6 socket, also to IPv4. /etc/hosts does not have these forms.
        socket.getnameinfo((plain if ":" in plain else f"::ffff:{plain}", 0), socket.NI_NUMERICSERV)


def gloo_interface(address: str) -> tuple[str, str] | None:
    """The interface of `address`, at which other nodes reach this host, and why gloo would not find it.

    None if gloo finds it. gloo takes the first address of the host's own name that it can bind (ProcessGroupGloo.cpp).
    Debian's installer gives that name the address 127.0.1.1. If the name is unknown, gloo uses 127.0.0.1. No other node
    reaches either. TensorPipe, which carries RPC, does the same (tensorpipe_agent.cpp). If all nodes are on this host
    gloo finds it too, but waits for a resolver that is slow.
    """
    name, begun_s = socket.gethostname(), time.monotonic()
    try:
        own = next((each for each in addresses(name, _OWN_NAME_S) if can_be_bound(each)), None)
    except NoAddress:
        own = None
    if is_loopback(address):
        if own is not None or time.monotonic() - begun_s < _OWN_NAME_S:
            return None
        why = f"the lookup of this host's own name, {name}, takes more than {_OWN_NAME_S:g} s, and gloo waits for it"
    elif own is None:
        why = f"this host's own name, {name}, has no address"
    elif is_loopback(own):
        why = f"this host resolves its own name, {name}, to {own}"
    else:
        return None
    interface = interface_of(address)
    return (interface, why) if interface else None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address` (IPv4 or IPv6); None if none has it."""
    plain, _, scope = address.partition("%")
    wanted = ipaddress.ip_address(plain)
    return scope or next((name for name, found in by_interface() if found == wanted), None)
