"""Where the job's store is and how this node takes part in the rendezvous, from options and variables.

Every backend of torchrun becomes one store. Nothing is connected here: `connect` does that.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import Options, Source, argv_of
from elaunch.launcher.options.rdzv_conf import Conf, parse_rdzv_conf
from elaunch.launcher.options.values import ENDPOINT_VARIABLES, PORT_MAX, Address, endpoints
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.endpoint import PREFIX, Endpoint, Login, Tls, Transport, how_to_send
from elaunch.rendezvous.times import Times

# torchrun's static rendezvous puts its store on MASTER_PORT. Here that port belongs to the workers.
MASTER_PORT = 29500
C10D_PORT = 29400
ETCD_PORT = 2379
_ETCD = ("etcd", "etcd-v2")
_ALONE = "one node needs no rendezvous"


@dataclass(frozen=True)
class RendezvousPlan:
    """What the command line means for the rendezvous. Without endpoints this node is alone and needs no server.

    `token` is the job's secret, empty if none was given; `token` and `login` are used if the store requires them.
    With `plainly`, http:// was typed: the user means an etcd without TLS, and a login may be sent to it. With `serves`,
    the head serves the job's store if nothing listens at the endpoint. `is_head`: this node is the head; None means
    that the endpoint's address decides.
    `node_rank` (static rendezvous) decides the ranks, and which node is the head. `master_addr` is the job's
    MASTER_ADDR as given; None means the first node's own address. `local_addr` is this node's address; None means the
    address that this node uses toward the endpoint. The job's keys begin with `prefix`, which starts and ends with a
    slash.
    """

    times: Times = field(default_factory=Times)
    endpoints: tuple[Endpoint, ...] = ()
    tls: Tls | None = None
    plainly: bool = False
    login: Login | None = None
    prefix: str = PREFIX
    token: str = field(default="", repr=False)
    transport: Transport = Transport.GATEWAY
    serves: bool = False
    is_head: bool | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None

    @property
    def own_addr(self) -> str | None:
        """The address at which other nodes reach this node, if the command line has one.

        MASTER_ADDR is the address of the node of rank 0; in a job of one node that is always this node.
        """
        is_first = self.is_alone or self.node_rank == 0
        return (self.master_addr if is_first else None) or self.local_addr

    @property
    def is_alone(self) -> bool:
        """Whether the job has one node, with its store in this process's memory."""
        return not self.endpoints


@dataclass(frozen=True)
class Planned:
    """The plan, with what the user should know about it.

    `ignored` are options without effect, each with the reason. `notes` are sentences for the user, shown once.
    `master_port` is the port in a static endpoint. `cluster` are the scheduler's facts. `at_its_head` is true if the
    endpoint is the scheduler's head node, which was not typed. `has_derived_token` is true if the token comes from the
    nodes' home, because the user gave none.
    """

    plan: RendezvousPlan
    ignored: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    master_port: int | None = None
    cluster: Cluster | None = None
    at_its_head: bool = False
    has_derived_token: bool = False


def locator_of(plan: RendezvousPlan) -> str:
    """The plan as JSON, with absolute paths: another process may have another working directory."""
    paths = astuple(plan.tls) if plan.tls else ()
    absolute = [path and str(Path(path).absolute()) for path in paths]
    return encode(replace(plan, tls=Tls(*absolute) if absolute else None))


def plan(
    options: Options, environ: Mapping[str, str], read_secret: Callable[[str], str], cluster: Cluster | None = None
) -> Planned:
    """Decide how this node takes part. `read_secret` reads a file that holds a token or password. Raises UsageError."""
    if options.standalone or options.nnodes[1] == 1:
        return replace(_plan_for_one_node(options), cluster=cluster)
    conf = parse_rdzv_conf(options.rdzv_conf)
    # torchrun's default is static. Here it is static only with --node-rank or --master-addr. Empty: the agent detects
    # which store listens at the endpoint.
    backend = "static" if {"node_rank", "master_addr"} & set(options.given) else ""
    if "rdzv_backend" in options.given:
        backend = options.rdzv_backend
    addresses, sources = given_addresses(options, environ, backend)
    notes = [*conf.notes, *sources]
    is_static = backend == "static"
    head = None
    if not addresses:
        if cluster is None or cluster.head is None or backend in _ETCD or is_static:
            raise _no_store(options, backend)
        # The scheduler's head serves the store.
        head = Address("", cluster.head, cluster.head_port)
        addresses = (head,)
    scheme = _choose_scheme(conf, addresses)
    # An existing etcd: a job's own store has one endpoint, and makes its own certificate.
    is_etcd = len(addresses) > 1 or bool(scheme) or backend in _ETCD or conf.transport is Transport.GRPC
    if head and is_etcd:
        raise _no_store(options, backend)
    master = _static_master(options) if is_static else None
    is_head = conf.is_host
    if is_head is None and (head or is_static):
        is_head = (cluster.node_index if cluster and head else options.node_rank) == 0
    pair = (conf.cert, conf.key)
    if not conf.cert:
        pair = (environ.get("ETCDCTL_CERT") or None, environ.get("ETCDCTL_KEY") or None)
    usual_port = C10D_PORT if backend == "c10d" else ETCD_PORT
    made = RendezvousPlan(
        times=_make_times(options, conf, cluster),
        endpoints=tuple(Endpoint(each.host, usual_port if each.port is None else each.port) for each in addresses),
        tls=Tls(conf.cacert or environ.get("ETCDCTL_CACERT") or None, *pair) if scheme == "https" else None,
        plainly=scheme == "http",
        login=_read_login(conf, environ, read_secret),
        prefix=conf.etcd_prefix,
        token=given_token(options, environ, read_secret),
        transport=conf.transport,
        serves=not is_etcd,
        is_head=is_head,
        node_rank=options.node_rank if is_static else None,
        master_addr=master.host if master else None,
        local_addr=_bare_host(options.local_addr),
    )
    if cluster and cluster.is_of_pods and (head or backend in ("static", "c10d")) and made.serves and not made.token:
        raise UsageError(
            "the first pod's store accepts only pods that know the job's token, and this pod has none; create a Secret"
            " once in a namespace, and give its token to all pods as ELAUNCH_TOKEN: kubectl create secret"
            " generic elaunch-token --from-literal=token=$(openssl rand -hex 16)"
        )
    where = ",".join(map(str, addresses))
    # A login from a variable may be for another store. In that case the agent probes what listens at the endpoint, and
    # sends no password without TLS.
    if made.login and not (made.tls or made.plainly) and (conf.user is not None or not made.serves):
        raise UsageError(
            f"the password of etcd's user {made.login.user} is sent over TLS only, and {where} does not show"
            f" whether it uses TLS; {how_to_send(*addresses)}"
        )
    if made.token and is_etcd and backend not in _ETCD:
        notes.append(f"the token is not used: {where} means an etcd, which has its own users")
    if made.login and made.plainly:
        notes.append(
            f"the password of etcd's user {made.login.user} goes unencrypted to {where}: anybody who"
            " can read the network can use it; for an etcd with TLS type https://"
        )
    if options.run_id is None and is_etcd:
        notes.append("the job is unnamed; if several jobs share the store, give each its own --run-id")
    # Options of the static backend, which the others ignore.
    reasons = {"node_rank": "ranks follow the order of arrival", "master_addr": "it is the first node's address"}
    ignored = [(f"--{n.replace('_', '-')}", why) for n, why in reasons.items() if n in options.given and not is_static]
    return Planned(
        made,
        (*ignored, *conf.ignored),
        tuple(notes),
        master.port if master else None,
        cluster,
        at_its_head=head is not None,
        has_derived_token=bool(cluster and cluster.nodes and not cluster.is_of_pods and made.serves and not made.token),
    )


def _plan_for_one_node(options: Options) -> Planned:
    """The plan of a job on one node, which needs no store. A static job still takes its master from the endpoint."""
    ignored = [name for name in ("rdzv_backend", "rdzv_endpoint", "rdzv_conf") if name in options.given]
    if options.standalone or options.rdzv_backend == "static":
        ignored = []
    if options.given.get("token_file") is Source.COMMAND_LINE:
        ignored.append("token_file")
    master = _static_master(options) if options.rdzv_backend == "static" and not options.standalone else None
    return Planned(
        RendezvousPlan(
            times=_make_times(options, Conf(), None),
            master_addr=master.host if master else _bare_host(options.master_addr),
            local_addr=_bare_host(options.local_addr),
        ),
        tuple((f"--{name.replace('_', '-')}", _ALONE) for name in ignored),
        master_port=master.port if master else None,
    )


def given_token(options: Options, environ: Mapping[str, str], read_secret: Callable[[str], str]) -> str:
    """The job's token.

    A file on the command line wins over ELAUNCH_TOKEN. The variable wins over a file that is named elsewhere.
    """
    variable = environ.get("ELAUNCH_TOKEN", "").strip()
    is_typed = options.given.get("token_file") is Source.COMMAND_LINE
    file = options.token_file if is_typed or not variable else None
    return read_secret(file) if file else variable


def _static_master(options: Options) -> Address | None:
    """MASTER_ADDR and MASTER_PORT. If an endpoint is given instead, both come from it, as in torchrun."""
    port = options.master_port[0] if options.master_port else None
    if options.master_addr:
        return Address("", _bare_host(options.master_addr) or "", port)
    if len(options.rdzv_endpoint) == 1 and not options.rdzv_endpoint[0].scheme:
        address = options.rdzv_endpoint[0]
        return replace(address, port=address.port if port is None else port)
    return None


def _bare_host(typed: str | None) -> str | None:
    """The host without the brackets of IPv6; None for an empty text."""
    return (typed or "").strip("[]") or None


def given_addresses(
    options: Options, environ: Mapping[str, str], backend: str
) -> tuple[tuple[Address, ...], tuple[str, ...]]:
    """The store's addresses that the user gave, and a note if they come from a variable. Both may be empty.

    Raises UsageError.
    """
    master = _static_master(options) if backend == "static" else None
    if options.rdzv_endpoint and not (master and not options.master_addr):
        return _check_addresses(options.rdzv_endpoint, "--rdzv-endpoint"), ()
    # ETCDCTL_ENDPOINTS names an etcd. torchrun's c10d backend and a static job do not use one.
    for variable in ENDPOINT_VARIABLES if backend != "c10d" and not master else ENDPOINT_VARIABLES[:1]:
        if text := environ.get(variable):
            try:
                found = endpoints(text)
            except ValueError as error:
                raise UsageError(f"{variable}={text} {error}") from None
            return _check_addresses(found, variable), (f"the store's address comes from {variable}: {text}",)
    if master:
        port = master.port or MASTER_PORT
        return (Address("", master.host, port + 1 if port < PORT_MAX else port - 1),), ()
    return (), ()


def _no_store(options: Options, backend: str) -> UsageError:
    """The error for a job of several nodes without the address of a store."""
    nodes = ":".join(str(number) for number in dict.fromkeys(options.nnodes))
    option, value, host = "--rdzv-endpoint", f"HOST:{ETCD_PORT}", "the name of one node, or of an etcd"
    if backend == "static":
        option, value, host = "--master-addr", "HOST", "the name of the node of rank 0"
    line = shlex.join(["elaunch", option, value, *argv_of(options.typed, options.program)])
    return UsageError(
        f"--nnodes {nodes} needs the address of a store where the nodes meet; type on every node, with {host} as HOST:"
        f" {line}"
    )


def _check_addresses(addresses: tuple[Address, ...], source: str) -> tuple[Address, ...]:
    if len({address.scheme for address in addresses}) > 1:
        raise UsageError(f"{source} mixes http and https; use one of them for all of {','.join(map(str, addresses))}")
    for address in addresses:
        if address.port == 0:
            raise UsageError(
                f"{source} {address}: with port 0 the system chooses the port, and the other nodes cannot know it; name"
                " a port"
            )
    return addresses


def _choose_scheme(conf: Conf, addresses: tuple[Address, ...]) -> str:
    """http, https or empty: the endpoint's, else the setting `protocol`, else https if a certificate is given.

    Raises UsageError if these contradict each other.
    """
    typed = addresses[0].scheme
    if typed and conf.protocol and typed != conf.protocol:
        raise UsageError(
            f"--rdzv-conf protocol={conf.protocol} contradicts the endpoint {addresses[0]}; drop one of them"
        )
    files = [name for name, value in (("cacert", conf.cacert), ("cert", conf.cert), ("key", conf.key)) if value]
    if conf.key and not conf.cert:
        raise UsageError(f"--rdzv-conf key={conf.key} has no certificate beside it; add cert=FILE")
    scheme = typed or conf.protocol or ("https" if files else "")
    if files and scheme == "http":
        raise UsageError(f"--rdzv-conf {files[0]} needs https, and the endpoint is {addresses[0]}; use https://")
    return scheme


def _make_times(options: Options, conf: Conf, cluster: Cluster | None) -> Times:
    """The times of a job. Raises UsageError if they contradict each other."""
    times = Times.for_lease(
        Times.lease_ttl_s if conf.lease_ttl is None else conf.lease_ttl,
        failure_grace_s=options.failure_grace,
        stop_grace_s=options.stop_grace,
        last_call_s=conf.last_call_timeout,
        join_timeout_s=conf.join_timeout,
        store_timeout_s=conf.store_timeout,
        keys_ttl_s=conf.keys_ttl,
        # Only the user knows how long a step may take.
        hang_timeout_s=options.hang_timeout if "hang_timeout" in options.given else 0.0,
        hang_after_s=options.hang_timeout,
    )
    if conf.keep_alive_interval is not None:
        times = replace(times, keepalive_s=min(times.keepalive_s, conf.keep_alive_interval))
    if cluster and cluster.nodes and cluster.nodes[0] == cluster.nodes[1]:
        times = replace(times, nodes_expected=cluster.nodes[1])
    try:
        times.check()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return times


def _read_login(conf: Conf, environ: Mapping[str, str], read_secret: Callable[[str], str]) -> Login | None:
    """The login in the settings, files and variables; None without a user. ETCDCTL_USER may be USER:PASSWORD.

    Raises UsageError.
    """
    user, _, password = environ.get("ETCDCTL_USER", "").partition(":")
    password = environ.get("ETCDCTL_PASSWORD") or password
    if conf.user:
        user, _, typed = conf.user.partition(":")
        if typed:
            raise UsageError(
                "--rdzv-conf user shows a password to everybody on this host; put it in a file and give"
                " password_file, or set ETCDCTL_PASSWORD"
            )
    if conf.password_file:
        password = read_secret(conf.password_file)
    if user and not password:
        raise UsageError(f"etcd's user {user} has no password; add --rdzv-conf password_file=FILE or ETCDCTL_PASSWORD")
    if conf.password_file and not user:
        raise UsageError(f"--rdzv-conf password_file={conf.password_file} has no user; add user=NAME")
    return Login(user, password) if user else None
