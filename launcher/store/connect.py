"""Connects a node to the job's store as the plan says, and finds the address at which other nodes reach this node."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.launcher.store.way import way_of
from elaunch.rendezvous.endpoint import Access, Endpoint, Transport
from elaunch.rendezvous.engine.memory_store import MemoryStore
from elaunch.rendezvous.store import Store

if TYPE_CHECKING:
    from elaunch.launcher.options.options import Options
    from elaunch.launcher.store.head import StoreProcess
    from elaunch.launcher.store.rendezvous_plan import Planned
    from elaunch.launcher.store.token_handover import Meeting, Offer

# A cluster's resolver may learn a host's name some time after the host is up.
_ADDRESS_WAIT_S = 60.0
_ADDRESS_PAUSE_S = 0.5


@dataclass(frozen=True)
class Reached:
    """The store, and this node's place in the network.

    `is_remote` is true if the store is in another process. `address` is this node's address for the other nodes, and
    `network` holds variables that tell the workers so. `served` is the store's process if this agent started it.
    `offer` sends the store's token to the nodes that the same scheduler started. `way` is how another
    process of this user reaches the store (`store.way`), empty for a store in this process. `invitation` and
    `only_here` are as in `AgentConfig`.
    """

    store: Store
    is_remote: bool
    address: str = "127.0.0.1"
    network: Mapping[str, str] = field(default_factory=dict)
    served: StoreProcess | None = None
    offer: Offer | None = None
    way: str = ""
    invitation: str = ""
    only_here: str = ""

    def close(self) -> None:
        """Stop what was started for the other nodes."""
        if self.offer:
            self.offer.close()
        if self.served:
            self.served.stop()


def reach(options: Options, planned: Planned, say: Callable[[str], None]) -> Reached:
    """The store that the plan names. If this node is the head, its store is started first. Nothing is sent to it yet.

    Raises UsageError and SiteError.
    """
    from elaunch.launcher.network.gloo import socket_variables

    plan = planned.plan
    if plan.is_alone:
        network = socket_variables("127.0.0.1", os.environ, say, verbose=options.verbose)
        return Reached(MemoryStore(), is_remote=False, address=plan.own_addr or "127.0.0.1", network=network)
    _check_node_rank_0(options, plan)
    _check_head_host(options, planned)
    address = plan.own_addr or _own_address(planned, say)
    from elaunch.launcher.store.head import serve_if_head

    if planned.hands_over:
        plan = _settle_head(options, planned, say)
    served, offer, invitation = serve_if_head(plan, say, options.nnodes), None, ""
    try:
        if served:
            offer, invitation = _tell_others(options, planned, served, say)
            plan = replace(plan, token=served.token)
        elif planned.hands_over:
            plan = replace(plan, token=_secret_of_head(_meeting(options, planned), plan, say))
        return Reached(
            store_of(plan, say),
            True,
            address,
            socket_variables(_numeric_address(address, planned, say), os.environ, say, verbose=options.verbose),
            served,
            offer,
            way_of(plan),
            invitation,
            only_here(plan),
        )
    except BaseException:
        Reached(MemoryStore(), True, served=served, offer=offer).close()
        raise


def only_here(plan: RendezvousPlan) -> str:
    """Why no other host reaches the store at the plan's endpoint, and what to give instead; empty if others may.

    A host's own name may be a loopback address here (Debian's 127.0.1.1), and another one on the other hosts.
    """
    from elaunch.launcher.network.reach import NoAddress, addresses, routable_addresses
    from elaunch.rendezvous.addresses import is_loopback, is_unspecified

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


def _tell_others(
    options: Options, planned: Planned, served: StoreProcess, say: Callable[[str], None]
) -> tuple[Offer | None, str]:
    """Tell the other nodes of the store that this node serves.

    A person gets a line to type, which is returned. A scheduler's tasks ask the offer that is returned.
    """
    from elaunch.launcher.store.join_command import NewToken, about, invitation

    if not planned.hands_over:
        new_token = NewToken(served.token, served.kept, served.trouble, is_terminal=os.isatty(2))
        lecture, lines = about(planned.plan), invitation(options, planned.plan, new_token)
        for line in lines:
            if line != lecture or options.verbose:
                say(line)
        return None, lines[1]
    if options.verbose:
        say(about(planned.plan))
    from elaunch.launcher.store.token_handover import Offer

    return Offer(_meeting(options, planned), served.token), ""


def _settle_head(options: Options, planned: Planned, say: Callable[[str], None]) -> RendezvousPlan:
    """Decide whether this node is the head. The plan of a head gets a token that nodes with the same home also make."""
    from elaunch.launcher.cluster.home_key import token_at_home
    from elaunch.launcher.store.head import decide_head

    is_head = decide_head(planned.plan, say)
    token = token_at_home(_meeting(options, planned).name, make=True) if is_head else ""
    return replace(planned.plan, is_head=is_head, token=token)


def _secret_of_head(meeting: Meeting, plan: RendezvousPlan, say: Callable[[str], None]) -> str:
    """The token of the store that another node serves; empty if an etcd listens there. The client warns of an etcd.

    Raises SiteError, and UsageError if an etcd without TLS listens where this node was to serve the store.
    """
    from elaunch.launcher.store.token_handover import fetch, port_taken_error

    endpoint = plan.endpoints[0]
    # A scheduler names one head, and this is it: a program that has the head's port already is no store of this job.
    if plan.is_head and not meeting.may_be_etcd:
        raise port_taken_error(endpoint, endpoint)
    token = fetch(meeting, plan.times.store_wait_s, say)
    if plan.is_head and not token:
        _check_is_etcd(endpoint, plan.times.call_deadline_s)
        raise UsageError(
            f"this node was to serve the job's store at {endpoint}, but an etcd without TLS listens there,"
            " and anybody can connect to it; if you mean that etcd, type on all nodes --rdzv-endpoint"
            f" http://{endpoint}; else choose a free port: --rdzv-endpoint {endpoint.host}:PORT"
        )
    return token


def _check_is_etcd(endpoint: Endpoint, deadline_s: float) -> None:
    """Raises UsageError if the server without TLS there is of another kind."""
    from elaunch.rendezvous.etcd.discovery import check_is_etcd
    from elaunch.rendezvous.store import Denied

    try:
        check_is_etcd(endpoint, deadline_s)
    except Denied as error:
        raise UsageError(str(error)) from None


def _meeting(options: Options, planned: Planned) -> Meeting:
    """Where this job's nodes meet. The name has the scheduler's job id: several jobs may have the same --run-id."""
    from elaunch.launcher.store.token_handover import Meeting

    cluster, endpoint = planned.cluster, planned.plan.endpoints[0]
    assert cluster
    name = f"{cluster.run_id or cluster.scheduler}.{cluster.restarts} {options.run_id} {endpoint.port}"
    return Meeting(endpoint, name, may_be_etcd=not planned.at_its_head)


def _check_node_rank_0(options: Options, plan: RendezvousPlan) -> None:
    """Raises UsageError if this node has rank 0, but MASTER_ADDR is another host, and is_host=1 is not given.

    Two hosts with node rank 0 (the same command on each) would be two jobs, or one job that waits in vain.
    """
    from elaunch.launcher.network.reach import NoAddress, Owner, owner_of
    from elaunch.launcher.options.rdzv_conf import understand

    if plan.node_rank != 0 or not plan.master_addr or understand(options.rdzv_conf).is_host:
        return
    # A name without an address yet may belong to this host.
    with suppress(NoAddress):
        if owner_of(plan.master_addr) is Owner.OTHER_HOST:
            others = {2: "1", 3: "1 or 2"}.get(options.nnodes[1], f"1 to {options.nnodes[1] - 1}")
            raise UsageError(
                f"node rank 0 belongs to the master's host, and {plan.master_addr} is no address of this host; on this"
                f" node use --node-rank {others}, or, if {plan.master_addr} leads here through a balancer,"
                " --rdzv-conf is_host=1"
            )


def _check_head_host(options: Options, planned: Planned) -> None:
    """Raises UsageError if the scheduler's node 0 runs here, but the head that it names is another host.

    The other nodes connect to the named head.
    """
    from elaunch.launcher.network.reach import NoAddress, Owner, owner_of
    from elaunch.launcher.options.rdzv_conf import understand

    cluster = planned.cluster
    if not (planned.at_its_head and planned.plan.is_head and cluster) or understand(options.rdzv_conf).is_host:
        return
    # Pods may know their head by the name of a service, which is no host's address.
    if cluster.is_of_pods:
        return
    with suppress(NoAddress):
        if cluster.head and owner_of(cluster.head) is Owner.OTHER_HOST:
            here = socket.gethostname()
            raise UsageError(
                f"the head of this job is {cluster.head}, which is no address of this host, {here}, but"
                f" {cluster.scheduler} runs node 0 here; give all nodes: --rdzv-endpoint {here}:PORT, or, for"
                f" mpirun, -x MASTER_ADDR={here}"
            )


def store_of(plan: RendezvousPlan, say: Callable[[str], None]) -> Store:
    """The client of the store at the plan's endpoints. Nothing is sent yet.

    Raises UsageError if the token is too short, or the transport is not installed.
    """
    from elaunch.rendezvous.etcd.store import EtcdStore

    deadline_s = plan.times.call_deadline_s
    access = Access(plan.tls, plan.login, plainly=plan.plainly, prefix=plan.prefix)
    if plan.transport is Transport.GRPC:
        return _over_grpc(plan, access)
    if plan.tls or plan.plainly or len(plan.endpoints) > 1:
        return EtcdStore(plan.endpoints, access, deadline_s)
    from elaunch.launcher.store.keyring import KeptTokens
    from elaunch.rendezvous.etcd.discovery import FoundStore

    try:
        return FoundStore(
            plan.endpoints[0],
            plan.token,
            access,
            deadline_s,
            expects_ours=plan.serving is not Serving.NOTHING,
            keyring=KeptTokens(),
            say=say,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _over_grpc(plan: RendezvousPlan, access: Access) -> Store:
    from elaunch.rendezvous.etcd.grpc_transport import GrpcTransport
    from elaunch.rendezvous.etcd.store import EtcdStore
    from elaunch.rendezvous.store import Denied

    try:
        return EtcdStore(plan.endpoints, access, plan.times.call_deadline_s, GrpcTransport(access))
    except Denied as error:
        raise UsageError(str(error)) from None


def _numeric_address(address: str, planned: Planned, say: Callable[[str], None]) -> str:
    """This node's address as a number. The command line may have given a name."""
    from elaunch.launcher.network.reach import NoAddress, addresses
    from elaunch.rendezvous.addresses import is_address, is_loopback

    if is_address(address):
        return address
    with suppress(NoAddress):
        if found := next((each for each in addresses(address) if not is_loopback(each)), None):
            return found
    return _own_address(planned, say)


def _own_address(planned: Planned, say: Callable[[str], None]) -> str:
    from elaunch.launcher.network.reach import AddressUnclear, NoAddress, own_address

    plan = planned.plan
    # The name may belong to a node that the scheduler has not started yet, as a pod.
    patience_s = plan.times.store_wait_s if planned.cluster else _ADDRESS_WAIT_S
    end_s = time.monotonic() + min(patience_s, plan.times.store_wait_s)
    is_said = False
    while True:
        try:
            return own_address(plan.endpoints)
        except AddressUnclear as error:
            raise UsageError(str(error)) from None
        except NoAddress as error:
            if time.monotonic() > end_s:
                raise SiteError(f"{error}; is --rdzv-endpoint right?") from None
            if not is_said:
                right = "" if planned.cluster else "is --rdzv-endpoint right? "
                say(f"{error}; {right}trying again for {patience_s:g} s")
                is_said = True
        time.sleep(_ADDRESS_PAUSE_S)
