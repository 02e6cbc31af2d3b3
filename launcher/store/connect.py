"""Connects a node to the job's store by the plan, and finds the address at which other nodes reach this node.

A head starts its store first, and prints the command to type on the other hosts.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import NoAddress, Owner, addresses, gloo_variables, own_address, owner_of, routable_addresses
from elaunch.launcher.options.options import Options, argv_of
from elaunch.launcher.options.rdzv_conf import parse_rdzv_conf
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import switch
from elaunch.launcher.store.locate import Planned, RendezvousPlan, locator_of
from elaunch.launcher.store.serve import StoreProcess, decide_head, how_to_join, serve_if_head
from elaunch.launcher.store.token import FOLDER, TOKEN_LINE, StoredTokens, derived_token
from elaunch.rendezvous.endpoint import Access, Endpoint, Transport, is_address, is_loopback, is_unspecified
from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.etcd.discovery import FoundStore
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.store import Denied, Store

# A cluster's DNS may have a host's name only some time after the host is up.
_ADDRESS_WAIT_S = 60.0
_ADDRESS_PAUSE_S = 0.5

# Each node has its own value of these.
_OWN = ("node_rank", "local_addr")
# PET_TOKEN_FILE is not written out: ELAUNCH_TOKEN wins over it, but --token-file would win over ELAUNCH_TOKEN.
_NOT_WRITTEN = (*_OWN, "token_file")
_SWITCHES = {option.name for option in TABLE if option.is_flag}


@dataclass(frozen=True)
class ConnectedStore:
    """The store, and this node's address in the network.

    `is_remote` is true if the store is in another process, and `served_pid` is that process if this agent started it.
    `address` is this node's address for the other nodes, and `network` holds the workers' variables for it. `locator`
    is how another process of this user reaches the store (`locate.locator_of`), empty for a store in this process.
    `invitation` and `only_here` are as in `AgentConfig`.
    """

    store: Store
    is_remote: bool
    address: str = "127.0.0.1"
    network: Mapping[str, str] = field(default_factory=dict)
    served_pid: int | None = None
    locator: str = ""
    invitation: str = ""
    only_here: str = ""


@contextmanager
def connect_store(options: Options, planned: Planned, log: Callable[[str], None]) -> Iterator[ConnectedStore]:
    """The store that the plan names. If this node is the head, its store is started first, and stopped at the end.

    Nothing is sent to it yet. Raises UsageError and SiteError.
    """
    plan = planned.plan
    if plan.is_alone:
        network = gloo_variables("127.0.0.1", os.environ, log, verbose=options.verbose)
        yield ConnectedStore(MemoryStore(), is_remote=False, address=plan.own_addr or "127.0.0.1", network=network)
        return
    _check_head_host(options, planned)
    address = plan.own_addr or _own_address(planned, log)
    keyring = StoredTokens()
    if planned.has_derived_token:
        plan, keyring = _with_derived_token(options, planned, log)
    served = serve_if_head(plan, log, options.nnodes[1])
    invitation: Sequence[str] = ()
    if planned.has_derived_token and planned.at_its_head and plan.is_head and not served:
        # A scheduler names one head, and this is it: a program that has the port already is not this job's store.
        endpoint = plan.endpoints[0]
        raise SiteError(
            f"another program has port {endpoint.port}, at which this node was to serve the job's store;"
            f" choose a free port: --rdzv-endpoint {endpoint.host}:PORT"
        )
    try:
        if served:
            if options.verbose:
                log(
                    f"this host serves the job's store at {plan.endpoints[0]} from its memory: store and job end with"
                    " this host's elaunch; a job that must outlive any host needs --rdzv-endpoint of an etcd cluster"
                )
            # A scheduler that knows the number of nodes has started all of them.
            if not (planned.has_derived_token or (planned.cluster and planned.cluster.nodes)):
                invitation = invite(options, plan, served, is_terminal=os.isatty(2))
            for line in invitation:
                log(line)
            plan = replace(plan, token=served.token)
        number = address if is_address(address) else ""
        with suppress(NoAddress):
            # The command line may have given a name.
            number = number or next((each for each in addresses(address) if not is_loopback(each)), "")
        number = number or _own_address(planned, log)
        yield ConnectedStore(
            store_of(plan, log, keyring),
            True,
            address,
            gloo_variables(number, os.environ, log, verbose=options.verbose),
            served.process.pid if served else None,
            locator_of(plan),
            next(iter(invitation), ""),
            only_here(plan),
        )
    finally:
        if served:
            served.stop()


def _with_derived_token(
    options: Options, planned: Planned, log: Callable[[str], None]
) -> tuple[RendezvousPlan, StoredTokens]:
    """The plan and the keyring of a scheduler's node, with the token that all nodes with this home derive.

    If the user typed the endpoint, it may be an etcd, which has no token: then only the head requires one.
    The token's name has the scheduler's job id: several jobs may have the same --run-id. Raises UsageError.
    """
    cluster, plan = planned.cluster, planned.plan
    assert cluster
    name = f"{cluster.run_id or cluster.scheduler}.{cluster.restarts} {options.run_id} {plan.endpoints[0].port}"
    token, is_head = derived_token(name), decide_head(plan, log)
    if not (is_head or planned.at_its_head):
        return plan, StoredTokens(token)
    if not token:
        raise UsageError(
            f"the nodes cannot derive the token of the job's store: {FOLDER}/key can neither be read nor made here;"
            f" give all nodes the same token, for example in the job's script before srun: {TOKEN_LINE}"
        )
    return replace(plan, is_head=is_head, token=token), StoredTokens()


def store_of(plan: RendezvousPlan, log: Callable[[str], None], keyring: StoredTokens | None = None) -> Store:
    """The client of the store at the plan's endpoints. Nothing is sent yet.

    Raises UsageError if the token is too short, or the transport is not installed.
    """
    deadline_s = plan.times.call_deadline_s
    access = Access(plan.tls, plan.login, plainly=plan.plainly, prefix=plan.prefix)
    try:
        if plan.transport is Transport.GRPC:
            # Imported here: grpcio is optional.
            from elaunch.rendezvous.etcd.grpc_transport import GrpcTransport

            return EtcdStore(plan.endpoints, access, deadline_s, GrpcTransport(access))
        if plan.tls or plan.plainly or len(plan.endpoints) > 1:
            return EtcdStore(plan.endpoints, access, deadline_s)
        return FoundStore(
            plan.endpoints[0],
            plan.token,
            access,
            deadline_s,
            expects_ours=plan.serves,
            keyring=keyring or StoredTokens(),
            log=log,
        )
    except (Denied, ValueError) as error:
        raise UsageError(str(error)) from None


def only_here(plan: RendezvousPlan) -> str:
    """Why no other host reaches the store at the plan's endpoint, and what to give instead; empty if others may.

    A host's own name may be a loopback address here (Debian's 127.0.1.1), and another one on the other hosts.
    """
    endpoint, own = plan.endpoints[0], socket.gethostname()
    if len(plan.endpoints) > 1 or endpoint.host.partition(".")[0] == own.partition(".")[0]:
        return ""
    try:
        found = addresses(endpoint.host)
    except NoAddress:
        return ""
    if not all(is_loopback(address) or is_unspecified(address) for address in found):
        return ""
    instead = (routable_addresses() or ["HOST"])[0]
    option = f"--master-addr {instead}" if plan.master_addr else f"--rdzv-endpoint {Endpoint(instead, endpoint.port)}"
    return (
        f"{endpoint} is an address of this host alone, and no other host can reach it: if another node is on another"
        f" host, give all nodes {option}"
    )


def _check_head_host(options: Options, planned: Planned) -> None:
    """Raises UsageError if this node is the head, by its rank or its scheduler, and the head's name is another host's.

    The other nodes connect to that name. Two hosts with node rank 0 (the same command on each) would be two jobs. With
    is_host=1 the name may be a load balancer's.
    """
    plan, cluster = planned.plan, planned.cluster
    # Pods may know their head by the name of a service, which is no host's address.
    is_scheduled = planned.at_its_head and plan.is_head and cluster and not cluster.is_of_pods
    head = plan.master_addr if plan.node_rank == 0 else cluster.head if cluster and is_scheduled else None
    if not head or parse_rdzv_conf(options.rdzv_conf).is_host:
        return
    # A name without an address yet may belong to this host.
    with suppress(NoAddress):
        if owner_of(head) is not Owner.OTHER_HOST:
            return
        if plan.node_rank == 0:
            others = {2: "1", 3: "1 or 2"}.get(options.nnodes[1], f"1 to {options.nnodes[1] - 1}")
            raise UsageError(
                f"node rank 0 belongs to the master's host, and {head} is not an address of this host; on this node use"
                f" --node-rank {others}, or, if {head} leads here through a load balancer, --rdzv-conf is_host=1"
            )
        here = socket.gethostname()
        raise UsageError(
            f"the head of this job is {head}, which is not an address of this host, {here}, but"
            f" {cluster and cluster.scheduler} runs node 0 here; give all nodes: --rdzv-endpoint {here}:PORT, or, for"
            f" mpirun, -x MASTER_ADDR={here}"
        )


def _own_address(planned: Planned, log: Callable[[str], None]) -> str:
    plan = planned.plan
    # The name may belong to a node that the scheduler has not started yet, such as a pod.
    patience_s = plan.times.store_wait_s if planned.cluster else _ADDRESS_WAIT_S
    end_s = time.monotonic() + min(patience_s, plan.times.store_wait_s)
    is_logged = False
    while True:
        try:
            return own_address(plan.endpoints)
        except NoAddress as error:
            if time.monotonic() > end_s:
                raise SiteError(f"{error}; is --rdzv-endpoint right?") from None
            if not is_logged:
                right = "" if planned.cluster else "is --rdzv-endpoint right? "
                log(f"{error}; {right}retrying for {patience_s:g} s")
                is_logged = True
        time.sleep(_ADDRESS_PAUSE_S)


def argv_for_others(options: Options, plan: RendezvousPlan) -> list[str]:
    """The command line for another host, without what is this node's own.

    Options from variables are written out, because the other host may not have the variables. Options from a job file
    stay in the file.
    """
    is_static = plan.node_rank is not None
    line = {"nnodes": ":".join(str(number) for number in dict.fromkeys(options.nnodes))}
    # A static job's endpoint follows from the master's address, or is the master's address.
    if not is_static:
        line["rdzv_endpoint"] = str(plan.endpoints[0])
    exported = {name: value for name, value in options.exported.items() if name not in _NOT_WRITTEN}
    line |= {name: value for name, value in exported.items() if name not in _SWITCHES or switch(value)}
    line |= {name: value for name, value in options.typed.items() if name not in _OWN}
    # Only this host is the head.
    settings = line.pop("rdzv_conf", "").split(",")
    if others := [pair for pair in settings if pair and not pair.strip().startswith("is_host")]:
        line["rdzv_conf"] = ",".join(others)
    return argv_of(line | ({"node_rank": "1"} if is_static else {}), options.program)


def invite(options: Options, plan: RendezvousPlan, served: StoreProcess, *, is_terminal: bool) -> tuple[str, ...]:
    """The lines that a head prints. A token that the user gave is not shown. Raises UsageError."""
    many = options.nnodes[1] > 2
    others = "each other node" if many else "the other node"
    same = " with the same token" if plan.token else ""
    ranks = ", with --node-rank 2 and so on after the first of them" if plan.node_rank is not None and many else ""
    made = None if plan.token else served
    line, *hints = how_to_join(argv_for_others(options, plan), plan.endpoints[0], made, is_terminal=is_terminal)
    return f"on {others} type{same}{ranks}: {line}", *hints
