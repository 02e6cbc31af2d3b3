"""Options and variables to the plan of the rendezvous: torchrun's backends, told as one store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elaunch.launcher.cluster.cluster import Cluster
from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.endpoints import PLACES, Address, endpoints
from elaunch.launcher.options.options import Options, Source
from elaunch.launcher.options.rdzv_conf import Conf, understand
from elaunch.launcher.options.shell_words import joined
from elaunch.launcher.options.values import PORT_MAX
from elaunch.launcher.store.login import check_login, login, sent_plainly
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.rendezvous.endpoint import Endpoint, Tls, Transport
from elaunch.rendezvous.times import Times

# torchrun's static rendezvous has its store on MASTER_PORT; here that port is the workers' own.
MASTER_PORT = 29500
C10D_PORT = 29400
ETCD_PORT = 2379

# What torchrun calls a job that nobody named. All its nodes must agree on one.
UNNAMED = "none"

_ETCD = ("etcd", "etcd-v2")
_ALONE = "one node needs no rendezvous"


@dataclass(frozen=True)
class Planned:
    """The plan, options that change nothing (with why), and sentences worth saying once.

    `master_port` is the one that a static endpoint names. `cluster` is what the scheduler says. With `at_its_head` the
    endpoint is this job's own head, and nobody typed it; with `hands_over` a head among the nodes tells the others the
    secret of its store, since nobody else did.
    """

    plan: RendezvousPlan
    ignored: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    master_port: int | None = None
    cluster: Cluster | None = None
    at_its_head: bool = False
    hands_over: bool = False


def plan(
    options: Options, environ: Mapping[str, str], read_secret: Callable[[str], str], cluster: Cluster | None = None
) -> Planned:
    """How this node takes part. `read_secret` reads a file that holds a token or password. Raises UsageError."""
    if options.standalone or options.nnodes[1] == 1:
        return replace(_alone(options), cluster=cluster)
    conf, raised = _long_enough(options, understand(options.rdzv_conf))
    backend = _backend(options)
    addresses, notes = _said_addresses(options, environ, backend)
    head = _head(cluster, backend) if cluster and not addresses else None
    addresses = addresses or _nowhere(options, backend, head)
    notes = (*raised, *notes)
    scheme = _scheme(conf, addresses)
    serving = _serving(options, conf, addresses, scheme, backend)
    if head and serving is Serving.NOTHING:
        _nowhere(options, backend, None)
    is_static = backend == "static"
    master = _static_master(options) if is_static else None
    is_first = is_static and options.node_rank == 0
    made = RendezvousPlan(
        times=_times(options, conf, cluster),
        endpoints=tuple(_endpoint(address, backend) for address in addresses),
        tls=_tls(conf, environ) if scheme == "https" else None,
        plainly=scheme == "http",
        login=login(conf, environ, read_secret),
        prefix=conf.prefix,
        token=_token(options, environ, read_secret),
        transport=conf.transport,
        serving=serving,
        is_head=_is_head(conf, is_first if is_static else None, cluster if head else None),
        node_rank=options.node_rank if is_static else None,
        master_addr=master.host if master else None,
        local_addr=_address_of(options.local_addr),
    )
    if cluster and cluster.is_of_pods and (head or backend in ("static", "c10d")):
        _check_secret(made)
    check_login(made, addresses, is_asked=conf.user is not None)
    if is_static and "node_rank" not in options.given:
        notes = (*notes, "this is node rank 0, since no --node-rank says otherwise")
    if backend == "etcd-v2":
        notes = (*notes, "--rdzv-backend etcd-v2 is understood as etcd: its v2 API is gone, v3 is spoken")
    notes = (*notes, *_unused_token(made, backend), *sent_plainly(made, addresses))
    if options.run_id is None and serving is Serving.NOTHING:
        notes = (*notes, f"the job is called {UNNAMED}; on a store for several jobs give each its own --run-id")
    return Planned(
        made,
        (*_pointless(options, backend), *conf.ignored),
        notes,
        master.port if master else None,
        cluster,
        at_its_head=head is not None,
        hands_over=cluster is not None
        and cluster.nodes is not None
        and not cluster.is_of_pods
        and serving is not Serving.NOTHING
        and not made.token,
    )


def _head(cluster: Cluster, backend: str) -> Address | None:
    """Where the scheduler's head serves the store; whoever means an etcd, or gives ranks, does not mean that."""
    if cluster.head is None or backend in (*_ETCD, "static"):
        return None
    return Address("", cluster.head, cluster.head_port)


def _is_head(conf: Conf, is_first: bool | None, at_its_head: Cluster | None) -> bool | None:
    if conf.is_host is not None:
        return conf.is_host
    return at_its_head.node_index == 0 if at_its_head else is_first


def _alone(options: Options) -> Planned:
    """A standalone job asks for no rendezvous, and a static one takes its address from the endpoint."""
    asked = [name for name in ("rdzv_backend", "rdzv_endpoint", "rdzv_conf") if name in options.given]
    if options.standalone or options.rdzv_backend == "static":
        asked = []
    asked += [name for name in ("store", "token_file") if options.given.get(name) is Source.COMMAND_LINE]
    master = _static_master(options) if options.rdzv_backend == "static" and not options.standalone else None
    return Planned(
        RendezvousPlan(
            times=_with_hang_timeout(
                options, Times.for_lease(stop_grace_s=options.stop_grace, failure_grace_s=options.failure_grace)
            ),
            master_addr=master.host if master else _address_of(options.master_addr),
            local_addr=_address_of(options.local_addr),
        ),
        tuple((f"--{name.replace('_', '-')}", _ALONE) for name in asked),
        master_port=master.port if master else None,
    )


def _backend(options: Options) -> str:
    """torchrun's name of the rendezvous; empty for a store that is found out at the endpoint.

    torchrun's default is static. A command without its own options (a rank, an address) can't mean that.
    """
    if "rdzv_backend" in options.given:
        return options.rdzv_backend
    return "static" if {"node_rank", "master_addr"} & set(options.given) else ""


def _address_of(typed: str | None) -> str | None:
    """A host as given, IPv6 without brackets; nothing for an empty word."""
    return (typed or "").strip("[]") or None


@dataclass(frozen=True)
class _Master:
    host: str
    port: int | None


def _static_master(options: Options) -> _Master | None:
    """MASTER_ADDR and MASTER_PORT; torchrun takes both from the endpoint where that is given."""
    if options.master_addr:
        return _Master(_address_of(options.master_addr) or "", options.master_port)
    if len(options.rdzv_endpoint) == 1 and not options.rdzv_endpoint[0].scheme:
        address = options.rdzv_endpoint[0]
        return _Master(address.host, address.port if options.master_port is None else options.master_port)
    return None


def _said_addresses(
    options: Options, environ: Mapping[str, str], backend: str
) -> tuple[tuple[Address, ...], tuple[str, ...]]:
    """Where the user says the store is, and a sentence where that was not on the command line; else nothing."""
    master = _static_master(options) if backend == "static" else None
    if options.rdzv_endpoint and not (master and not options.master_addr):
        return _of_several_nodes(options.rdzv_endpoint, "--rdzv-endpoint"), ()
    # torchrun's c10d and a static job mean no etcd.
    for variable in PLACES if backend != "c10d" and not master else PLACES[:1]:
        if text := environ.get(variable):
            try:
                found = endpoints(text)
            except ValueError as error:
                raise UsageError(f"{variable}={text} {error}") from None
            return _of_several_nodes(found, variable), (f"the store is that of {variable}: {text}",)
    if master:
        return (Address("", master.host, _store_port(master)),), ()
    return (), ()


def _nowhere(options: Options, backend: str, head: Address | None) -> tuple[Address, ...]:
    """The head, where nobody said anything else. Raises UsageError where there is none."""
    if head:
        return (head,)
    nodes = ":".join(str(number) for number in dict.fromkeys(options.nnodes))
    if backend == "static":
        way_out = "with the name of the node of rank 0 as HOST: "
        line = joined(["elaunch", "--master-addr", "HOST", *options.typed])
    else:
        way_out = "with the name of one of them, or of an etcd, as HOST: "
        line = joined(["elaunch", "--rdzv-endpoint", f"HOST:{ETCD_PORT}", *options.typed])
    raise UsageError(f"--nnodes {nodes} needs a place where the nodes meet; type on each of them, {way_out}{line}")


def _store_port(master: _Master) -> int:
    port = (master.port or MASTER_PORT) + 1
    if port > PORT_MAX:
        raise UsageError(
            f"the job's store would be on the port after --master-port {master.port}, and there is none;"
            " say where it is with --rdzv-endpoint HOST:PORT"
        )
    return port


def _of_several_nodes(addresses: tuple[Address, ...], source: str) -> tuple[Address, ...]:
    if len({address.scheme for address in addresses}) > 1:
        raise UsageError(f"{source} mixes http and https; use one of them for all of {_joined(addresses)}")
    for address in addresses:
        if address.port == 0:
            raise UsageError(
                f"{source} {address} lets the system choose a port, and the other nodes would not know it; name one"
            )
    return addresses


def _joined(addresses: tuple[Address, ...]) -> str:
    return ",".join(str(address) for address in addresses)


def _endpoint(address: Address, backend: str) -> Endpoint:
    default = C10D_PORT if backend == "c10d" else ETCD_PORT
    return Endpoint(address.host, default if address.port is None else address.port)


def _scheme(conf: Conf, addresses: tuple[Address, ...]) -> str:
    """What the endpoint says, else the setting; a certificate's file is for nothing else than https."""
    typed = addresses[0].scheme
    if typed and conf.protocol and typed != conf.protocol:
        raise UsageError(
            f"--rdzv-conf protocol={conf.protocol} contradicts the endpoint {addresses[0]}; drop one of them"
        )
    files = [name for name, value in (("cacert", conf.ca), ("cert", conf.certificate), ("key", conf.key)) if value]
    if conf.key and not conf.certificate:
        raise UsageError(f"--rdzv-conf key={conf.key} is the key of no certificate; add cert=FILE")
    scheme = typed or conf.protocol or ("https" if files else "")
    if files and scheme == "http":
        raise UsageError(f"--rdzv-conf {files[0]} is for https and the endpoint is {addresses[0]}; use https://")
    return scheme


def _serving(options: Options, conf: Conf, addresses: tuple[Address, ...], scheme: str, backend: str) -> Serving:
    """What this job may start itself: never beside a cluster, nor where the endpoint can only be somebody's etcd."""
    foreign = (
        f"the endpoints {_joined(addresses)} are a cluster's" if len(addresses) > 1
        else f"{addresses[0]} speaks https with certificates" if scheme == "https"
        else f"{addresses[0]} is an etcd without TLS" if scheme == "http"
        else f"--rdzv-backend {backend} means an etcd that runs already" if backend in _ETCD
        else ""
    )  # fmt: skip
    if options.store == "auto":
        is_ours = not foreign and conf.transport is Transport.GATEWAY
        return Serving.MEMORY if is_ours else Serving.NOTHING
    if foreign:
        raise UsageError(f"--store {options.store} would start a store, and {foreign}; leave --store out")
    if options.store == "memory" and conf.transport is Transport.GRPC:
        raise UsageError("--store memory is not spoken to over grpc; leave --rdzv-conf transport out")
    return Serving(options.store)


def _tls(conf: Conf, environ: Mapping[str, str]) -> Tls:
    certificate, key = conf.certificate, conf.key
    if certificate is None:
        certificate, key = environ.get("ETCDCTL_CERT"), environ.get("ETCDCTL_KEY")
    return Tls(conf.ca or environ.get("ETCDCTL_CACERT") or None, certificate or None, key or None)


def _token(options: Options, environ: Mapping[str, str], read_secret: Callable[[str], str]) -> str:
    """The job's secret: a file that the command line names, else the variable, else a file named elsewhere."""
    variable = environ.get("ELAUNCH_TOKEN", "").strip()
    is_typed = options.given.get("token_file") is Source.COMMAND_LINE
    file = options.token_file if is_typed or not variable else None
    token = read_secret(file) if file else variable
    # The token goes to the store's process as a line of text, and is typed on the other hosts.
    if not token.isprintable():
        raise UsageError(
            f"the job's token in {file or 'ELAUNCH_TOKEN'} has characters that cannot be typed; take the output of:"
            " openssl rand -hex 16"
        )
    return token


def _check_secret(made: RendezvousPlan) -> None:
    """Raises UsageError where the pods' store is one of them, which would take none of the others."""
    if made.serving is Serving.NOTHING or made.token:
        return
    raise UsageError(
        "the first pod's store takes only those who know the job's token, and this pod has none; make a Secret, once in"
        " a namespace, and give its token to all pods as ELAUNCH_TOKEN (docs/kubernetes.md): kubectl create secret"
        " generic elaunch-token --from-literal=token=$(openssl rand -hex 16)"
    )


def _unused_token(made: RendezvousPlan, backend: str) -> tuple[str, ...]:
    """Who gave a token expects a store that knows it. Who asks for an etcd by --rdzv-backend knows better."""
    why = (
        "several endpoints are an etcd cluster's" if len(made.endpoints) > 1
        else "https is spoken by an etcd with certificates of its own" if made.tls
        else "http:// means an etcd without TLS" if made.plainly
        else "grpc is spoken by an etcd only" if made.transport is Transport.GRPC
        else ""
    )  # fmt: skip
    if not (made.token and why) or backend in _ETCD:
        return ()
    return (f"the token is not used: {why}; who may write there is what etcd's own protection says",)


def _times(options: Options, conf: Conf, cluster: Cluster | None) -> Times:
    times = Times.for_lease(
        Times.lease_ttl_s if conf.lease_ttl_s is None else conf.lease_ttl_s,
        failure_grace_s=options.failure_grace,
        stop_grace_s=options.stop_grace,
        last_call_s=Times.last_call_s if conf.last_call_s is None else conf.last_call_s,
        join_timeout_s=conf.join_timeout_s,
        store_timeout_s=conf.store_timeout_s,
        keys_ttl_s=conf.keys_ttl_s,
    )
    if conf.keepalive_s is not None:
        times = replace(times, keepalive_s=min(times.keepalive_s, conf.keepalive_s))
    if cluster and cluster.nodes and cluster.nodes[0] == cluster.nodes[1]:
        times = replace(times, nodes_expected=cluster.nodes[1])
    try:
        times.check()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _with_hang_timeout(options, times)


def _with_hang_timeout(options: Options, times: Times) -> Times:
    return replace(times, hang_timeout_s=options.hang_timeout)


def _long_enough(options: Options, conf: Conf) -> tuple[Conf, tuple[str, ...]]:
    """A join_timeout that torchrun takes, raised to the shortest one that is safe here, and the sentence about it."""
    if conf.join_timeout_s is None:
        return conf, ()
    others = Times.for_lease(
        Times.lease_ttl_s if conf.lease_ttl_s is None else conf.lease_ttl_s,
        failure_grace_s=options.failure_grace,
        stop_grace_s=options.stop_grace,
        last_call_s=Times.last_call_s if conf.last_call_s is None else conf.last_call_s,
    )
    shortest_s = others.join_timeout_min_s
    if conf.join_timeout_s >= shortest_s:
        return conf, ()
    note = (
        f"join_timeout is {shortest_s:g} s instead of {conf.join_timeout_s:g} s: a node that stops its workers first"
        f" (--stop-grace {options.stop_grace:g}) or waits for a last call would be given up"
    )
    return replace(conf, join_timeout_s=shortest_s), (note,)


def _pointless(options: Options, backend: str) -> tuple[tuple[str, str], ...]:
    """Options of the static rendezvous in a job whose nodes find out who is first."""
    if backend == "static":
        return ()
    reasons = {"node_rank": "ranks follow the order of arrival", "master_addr": "it is the first node's address"}
    return tuple((f"--{n.replace('_', '-')}", why) for n, why in reasons.items() if n in options.given)
