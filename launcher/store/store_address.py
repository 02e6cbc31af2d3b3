"""Finds the address of the job's store in the options and variables, and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.endpoints import PLACES, Address, endpoints
from elaunch.launcher.options.options import Options, words_of
from elaunch.launcher.options.shell_words import joined
from elaunch.launcher.options.values import PORT_MAX
from elaunch.rendezvous.endpoint import Endpoint

if TYPE_CHECKING:
    from elaunch.launcher.options.rdzv_conf import Conf

# torchrun's static rendezvous puts its store on MASTER_PORT. Here that port belongs to the workers.
MASTER_PORT = 29500
C10D_PORT = 29400
ETCD_PORT = 2379


@dataclass(frozen=True)
class Master:
    """The master of a static rendezvous. `port` is None if nobody gave one."""

    host: str
    port: int | None


def static_master(options: Options) -> Master | None:
    """MASTER_ADDR and MASTER_PORT. If an endpoint is given instead, both come from it, as in torchrun."""
    port = options.master_port[0] if options.master_port else None
    if options.master_addr:
        return Master(bare_host(options.master_addr) or "", port)
    if len(options.rdzv_endpoint) == 1 and not options.rdzv_endpoint[0].scheme:
        address = options.rdzv_endpoint[0]
        return Master(address.host, address.port if port is None else port)
    return None


def bare_host(typed: str | None) -> str | None:
    """The host without the brackets of IPv6; None for an empty word."""
    return (typed or "").strip("[]") or None


def given_addresses(
    options: Options, environ: Mapping[str, str], backend: str
) -> tuple[tuple[Address, ...], tuple[str, ...]]:
    """The store's addresses that the user gave, and a note if they come from a variable. Both may be empty.

    Raises UsageError.
    """
    master = static_master(options) if backend == "static" else None
    if options.rdzv_endpoint and not (master and not options.master_addr):
        return _check_addresses(options.rdzv_endpoint, "--rdzv-endpoint"), ()
    # ETCDCTL_ENDPOINTS names an etcd. torchrun's c10d backend and a static job do not use one.
    for variable in PLACES if backend != "c10d" and not master else PLACES[:1]:
        if text := environ.get(variable):
            try:
                found = endpoints(text)
            except ValueError as error:
                raise UsageError(f"{variable}={text} {error}") from None
            return _check_addresses(found, variable), (f"the store's address comes from {variable}: {text}",)
    if master:
        return (Address("", master.host, _store_port(master)),), ()
    return (), ()


def require_head(options: Options, backend: str, head: Address | None) -> tuple[Address, ...]:
    """The scheduler's head as the store's address. Raises UsageError if there is none."""
    if head:
        return (head,)
    nodes = ":".join(str(number) for number in dict.fromkeys(options.nnodes))
    if backend == "static":
        host = "the name of the node of rank 0"
        line = joined(["elaunch", "--master-addr", "HOST", *words_of(options.typed, options.program)])
    else:
        host = "the name of one node, or of an etcd"
        line = joined(["elaunch", "--rdzv-endpoint", f"HOST:{ETCD_PORT}", *words_of(options.typed, options.program)])
    raise UsageError(
        f"--nnodes {nodes} needs the address of a store where the nodes meet; type on every node, with {host} as HOST:"
        f" {line}"
    )


def _store_port(master: Master) -> int:
    port = (master.port or MASTER_PORT) + 1
    if port > PORT_MAX:
        raise UsageError(
            f"the job's store uses the port after --master-port {master.port}, and there is no such port;"
            " name another address for the store with --rdzv-endpoint HOST:PORT"
        )
    return port


def _check_addresses(addresses: tuple[Address, ...], source: str) -> tuple[Address, ...]:
    if len({address.scheme for address in addresses}) > 1:
        raise UsageError(f"{source} mixes http and https; use one of them for all of {comma_list(addresses)}")
    for address in addresses:
        if address.port == 0:
            raise UsageError(
                f"{source} {address}: with port 0 the system chooses the port, and the other nodes cannot know it; name"
                " a port"
            )
    return addresses


def comma_list(addresses: tuple[Address, ...]) -> str:
    return ",".join(str(address) for address in addresses)


def endpoint(address: Address, backend: str) -> Endpoint:
    default = C10D_PORT if backend == "c10d" else ETCD_PORT
    return Endpoint(address.host, default if address.port is None else address.port)


def choose_scheme(conf: Conf, addresses: tuple[Address, ...]) -> str:
    """http, https or empty: what the endpoint says, else the setting `protocol`, else https if a certificate is given.

    Raises UsageError if these contradict each other.
    """
    typed = addresses[0].scheme
    if typed and conf.protocol and typed != conf.protocol:
        raise UsageError(
            f"--rdzv-conf protocol={conf.protocol} contradicts the endpoint {addresses[0]}; drop one of them"
        )
    files = [name for name, value in (("cacert", conf.ca), ("cert", conf.certificate), ("key", conf.key)) if value]
    if conf.key and not conf.certificate:
        raise UsageError(f"--rdzv-conf key={conf.key} has no certificate beside it; add cert=FILE")
    scheme = typed or conf.protocol or ("https" if files else "")
    if files and scheme == "http":
        raise UsageError(f"--rdzv-conf {files[0]} needs https, and the endpoint is {addresses[0]}; use https://")
    return scheme
