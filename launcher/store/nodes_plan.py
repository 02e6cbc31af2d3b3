"""Makes the plan of the rendezvous of several nodes. Every backend of torchrun becomes one store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.launcher.cluster.cluster import Cluster
from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.endpoints import Address
from elaunch.launcher.options.options import Options, Source
from elaunch.launcher.options.rdzv_conf import Conf, understand
from elaunch.launcher.store.login import check_login, plain_password_notes, read_login
from elaunch.launcher.store.plan_times import make_times
from elaunch.launcher.store.rendezvous_plan import Planned, RendezvousPlan, Serving
from elaunch.launcher.store.store_address import (
    bare_host,
    choose_scheme,
    comma_list,
    endpoint,
    given_addresses,
    require_head,
    static_master,
)
from elaunch.rendezvous.endpoint import Tls, Transport

_ETCD = ("etcd", "etcd-v2")


def plan_for_nodes(
    options: Options, environ: Mapping[str, str], read_secret: Callable[[str], str], cluster: Cluster | None
) -> Planned:
    """`plan` for a job of several nodes."""
    conf = understand(options.rdzv_conf)
    backend = _backend(options)
    addresses, notes = given_addresses(options, environ, backend)
    head = _scheduler_head(cluster, backend) if cluster and not addresses else None
    addresses = addresses or require_head(options, backend, head)
    notes = (*conf.notes, *notes)
    scheme = choose_scheme(conf, addresses)
    serving = _serving(options, conf, addresses, scheme, backend)
    if head and serving is Serving.NOTHING:
        require_head(options, backend, None)
    is_static = backend == "static"
    master = static_master(options) if is_static else None
    is_first = is_static and options.node_rank == 0
    made = RendezvousPlan(
        times=make_times(options, conf, cluster),
        endpoints=tuple(endpoint(address, backend) for address in addresses),
        tls=_tls(conf, environ) if scheme == "https" else None,
        plainly=scheme == "http",
        login=read_login(conf, environ, read_secret),
        prefix=conf.prefix,
        token=_token(options, environ, read_secret),
        transport=conf.transport,
        serving=serving,
        is_head=_is_head(conf, is_first if is_static else None, cluster if head else None),
        node_rank=options.node_rank if is_static else None,
        master_addr=master.host if master else None,
        local_addr=bare_host(options.local_addr),
    )
    if cluster and cluster.is_of_pods and (head or backend in ("static", "c10d")):
        _check_secret(made)
    check_login(made, addresses, is_asked=conf.user is not None)
    if is_static and "node_rank" not in options.given:
        notes = (*notes, "this node has rank 0, since no --node-rank is given")
    if backend == "etcd-v2":
        notes = (*notes, "--rdzv-backend etcd-v2 means etcd here: the v2 API is gone, and elaunch uses v3")
    notes = (*notes, *_unused_token_notes(made, backend), *plain_password_notes(made, addresses))
    if options.run_id is None and serving is Serving.NOTHING:
        notes = (*notes, "the job is unnamed; if several jobs share the store, give each its own --run-id")
    return Planned(
        made,
        (*_options_without_effect(options, backend), *conf.ignored),
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


def _scheduler_head(cluster: Cluster, backend: str) -> Address | None:
    """The address at which the scheduler's head serves the store; None for the backends etcd and static."""
    if cluster.head is None or backend in (*_ETCD, "static"):
        return None
    return Address("", cluster.head, cluster.head_port)


def _is_head(conf: Conf, is_first: bool | None, at_its_head: Cluster | None) -> bool | None:
    if conf.is_host is not None:
        return conf.is_host
    return at_its_head.node_index == 0 if at_its_head else is_first


def _backend(options: Options) -> str:
    """torchrun's name of the backend; empty if the agent finds out at the endpoint which store listens there.

    torchrun's default is static. Here it is static only with --node-rank or --master-addr.
    """
    if "rdzv_backend" in options.given:
        return options.rdzv_backend
    return "static" if {"node_rank", "master_addr"} & set(options.given) else ""


def _serving(options: Options, conf: Conf, addresses: tuple[Address, ...], scheme: str, backend: str) -> Serving:
    """The store that this job may start itself: none if the endpoint can only be an etcd that runs already."""
    foreign = (
        f"the endpoints {comma_list(addresses)} are an etcd cluster" if len(addresses) > 1
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
        raise UsageError("--store memory does not speak gRPC; leave --rdzv-conf transport out")
    return Serving(options.store)


def _tls(conf: Conf, environ: Mapping[str, str]) -> Tls:
    certificate, key = conf.certificate, conf.key
    if certificate is None:
        certificate, key = environ.get("ETCDCTL_CERT"), environ.get("ETCDCTL_KEY")
    return Tls(conf.ca or environ.get("ETCDCTL_CACERT") or None, certificate or None, key or None)


def _token(options: Options, environ: Mapping[str, str], read_secret: Callable[[str], str]) -> str:
    """The job's token.

    A file on the command line wins over ELAUNCH_TOKEN. The variable wins over a file that is named elsewhere.
    """
    variable = environ.get("ELAUNCH_TOKEN", "").strip()
    is_typed = options.given.get("token_file") is Source.COMMAND_LINE
    file = options.token_file if is_typed or not variable else None
    token = read_secret(file) if file else variable
    # The token is one line on the stdin of the store's process, and a person types it on the other hosts.
    if not token.isprintable():
        raise UsageError(
            f"the job's token in {file or 'ELAUNCH_TOKEN'} has characters that cannot be typed; take the output of:"
            " openssl rand -hex 16"
        )
    return token


def _check_secret(made: RendezvousPlan) -> None:
    """Raises UsageError if a pod is to serve the store without a token: no other pod could connect to it."""
    if made.serving is Serving.NOTHING or made.token:
        return
    raise UsageError(
        "the first pod's store accepts only pods that know the job's token, and this pod has none; create a Secret once"
        " in a namespace, and give its token to all pods as ELAUNCH_TOKEN: kubectl create secret"
        " generic elaunch-token --from-literal=token=$(openssl rand -hex 16)"
    )


def _unused_token_notes(made: RendezvousPlan, backend: str) -> tuple[str, ...]:
    """A note for a user who gave a token, if the store cannot use it. Nothing if --rdzv-backend names an etcd."""
    why = (
        "several endpoints mean an etcd cluster" if len(made.endpoints) > 1
        else "https means an etcd with its own certificates" if made.tls
        else "http:// means an etcd without TLS" if made.plainly
        else "only an etcd speaks gRPC" if made.transport is Transport.GRPC
        else ""
    )  # fmt: skip
    if not (made.token and why) or backend in _ETCD:
        return ()
    return (f"the token is not used: {why}; etcd's own access control decides who may write there",)


def _options_without_effect(options: Options, backend: str) -> tuple[tuple[str, str], ...]:
    """Options of the static backend that another backend ignores, each with the reason."""
    if backend == "static":
        return ()
    reasons = {"node_rank": "ranks follow the order of arrival", "master_addr": "it is the first node's address"}
    return tuple((f"--{n.replace('_', '-')}", why) for n, why in reasons.items() if n in options.given)
