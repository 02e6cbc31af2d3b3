"""The plan of a rendezvous to the store that the agent uses, and to the address at which others reach this node."""

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
from elaunch.rendezvous.endpoint import Access, Transport
from elaunch.rendezvous.engine.memory_store import MemoryStore
from elaunch.rendezvous.store import Store

if TYPE_CHECKING:
    from elaunch.launcher.options.options import Options
    from elaunch.launcher.store.head import StoreProcess
    from elaunch.launcher.store.plan import Planned
    from elaunch.launcher.store.token_handover import Meeting, Offer

# A name may be known to a cluster's resolver some time after the host is up.
_ADDRESS_WAIT_S = 60.0
_ADDRESS_PAUSE_S = 0.5


@dataclass(frozen=True)
class Reached:
    """The store, and where this node is: `address` is what the others reach, `network` what tells the workers so.

    `is_remote` says that it is in another process; `served` is that process, where it is this agent's, and `offer` its
    secret, for the nodes that the same scheduler started.
    """

    store: Store
    is_remote: bool
    address: str = "127.0.0.1"
    network: Mapping[str, str] = field(default_factory=dict)
    served: StoreProcess | None = None
    offer: Offer | None = None

    def close(self) -> None:
        """End what was started for the others."""
        if self.offer:
            self.offer.close()
        if self.served:
            self.served.stop()


def reach(options: Options, planned: Planned, say: Callable[[str], None]) -> Reached:
    """What the plan names; its store is served first where this node is the head. Nothing is sent to it yet.

    Raises UsageError and SiteError.
    """
    plan = planned.plan
    if plan.is_alone:
        return Reached(MemoryStore(), is_remote=False, address=plan.own_addr or "127.0.0.1")
    _check_first(options, plan)
    _check_head(options, planned)
    address = plan.own_addr or _own_address(planned, say)
    from elaunch.launcher.store.head import take_the_head

    if planned.hands_over:
        plan = _settled(options, planned, say)
    served, offer = take_the_head(plan, say, options.nnodes), None
    try:
        if served:
            offer = _welcome(options, planned, served, say)
            plan = replace(plan, token=served.token)
        elif planned.hands_over:
            plan = replace(plan, token=_secret_of_head(_meeting(options, planned), plan, say))
        return Reached(store_of(plan, say), True, address, _network(_number(address, planned, say), say), served, offer)
    except BaseException:
        Reached(MemoryStore(), True, served=served, offer=offer).close()
        raise


def _welcome(options: Options, planned: Planned, served: StoreProcess, say: Callable[[str], None]) -> Offer | None:
    """Tell the others of the store that is served here: people by a line to type, a scheduler's tasks by themselves."""
    from elaunch.launcher.store.join_command import Telling, about, invitation

    if not planned.hands_over:
        telling = Telling(served.token, served.kept, served.trouble, is_terminal=os.isatty(2))
        for line in invitation(options, planned.plan, telling):
            say(line)
        return None
    say(about(planned.plan))
    from elaunch.launcher.store.token_handover import Offer

    return Offer(_meeting(options, planned), served.token)


def _settled(options: Options, planned: Planned, say: Callable[[str], None]) -> RendezvousPlan:
    """The plan, with whether this node is the head; that of a head with a token which its user's nodes make too."""
    from elaunch.launcher.cluster.home_key import token_at_home
    from elaunch.launcher.store.head import is_the_head

    is_head = is_the_head(planned.plan, say)
    token = token_at_home(_meeting(options, planned).name, make=True) if is_head else ""
    return replace(planned.plan, is_head=is_head, token=token)


def _secret_of_head(meeting: Meeting, plan: RendezvousPlan, say: Callable[[str], None]) -> str:
    """The token of the store that another node serves; empty if an etcd listens there, which the client tells the user.

    Raises SiteError, and UsageError if an etcd without TLS listens where this node was to serve the store.
    """
    from elaunch.launcher.store.token_handover import fetch, taken

    endpoint = plan.endpoints[0]
    # A scheduler has one head: what has the head's port on the head itself is no store of this job.
    if plan.is_head and not meeting.may_be_etcd:
        raise taken(endpoint, endpoint)
    token = fetch(meeting, plan.times.join_timeout_s, say)
    if plan.is_head and not token:
        raise UsageError(
            f"this node was to serve the job's store at {endpoint}, but an etcd without TLS listens there,"
            " which lets anybody in; if you mean that etcd, type on all nodes --rdzv-endpoint"
            f" http://{endpoint}; else choose a free port: --rdzv-endpoint {endpoint.host}:PORT"
        )
    return token


def _meeting(options: Options, planned: Planned) -> Meeting:
    """Its name is the scheduler's: of one with --run-id there may be several."""
    from elaunch.launcher.store.token_handover import Meeting

    cluster, endpoint = planned.cluster, planned.plan.endpoints[0]
    assert cluster
    name = f"{cluster.run_id or cluster.scheduler}.{cluster.restarts} {options.run_id} {endpoint.port}"
    return Meeting(endpoint, name, may_be_etcd=not planned.at_its_head)


def _check_first(options: Options, plan: RendezvousPlan) -> None:
    """Raises UsageError where node rank 0 is asked for on a host that is not the master's, and nobody says it is.

    Two hosts that both think so (the same command on each) would be two jobs, or one that waits in vain.
    """
    from elaunch.launcher.network.reach import NoAddress, Whose, whose
    from elaunch.launcher.options.rdzv_conf import understand

    if plan.node_rank != 0 or not plan.master_addr or understand(options.rdzv_conf).is_host:
        return
    # A name that is not known yet may be this host's.
    with suppress(NoAddress):
        if whose(plan.master_addr) is Whose.ANOTHERS:
            others = {2: "1", 3: "1 or 2"}.get(options.nnodes[1], f"1 to {options.nnodes[1] - 1}")
            raise UsageError(
                f"node rank 0 is that of the master's host, and {plan.master_addr} is no address of this one; on this"
                f" node use --node-rank {others}, or, where {plan.master_addr} leads here all the same (a balancer),"
                " --rdzv-conf is_host=1"
            )


def _check_head(options: Options, planned: Planned) -> None:
    """Raises UsageError where the scheduler's head is not the host that its node 0 runs on: the others go there."""
    from elaunch.launcher.network.reach import NoAddress, Whose, whose
    from elaunch.launcher.options.rdzv_conf import understand

    cluster = planned.cluster
    if not (planned.at_its_head and planned.plan.is_head and cluster) or understand(options.rdzv_conf).is_host:
        return
    # Pods may know their head by the name of a service, which is no host's address.
    if cluster.is_of_pods:
        return
    with suppress(NoAddress):
        if cluster.head and whose(cluster.head) is Whose.ANOTHERS:
            here = socket.gethostname()
            raise UsageError(
                f"the head of this job is said to be {cluster.head}, which is no address of this host, {here}, and"
                f" {cluster.scheduler} runs its node 0 here; tell all nodes: --rdzv-endpoint {here}:PORT, or, for"
                f" mpirun, -x MASTER_ADDR={here}"
            )


def store_of(plan: RendezvousPlan, say: Callable[[str], None]) -> Store:
    """The store at the plan's endpoints; nothing is sent to it yet.

    Raises UsageError for a token that is too short and a transport that is not installed.
    """
    from elaunch.rendezvous.etcd.store import EtcdStore

    deadline_s = plan.times.call_deadline_s
    access = Access(plan.tls, plan.login, plainly=plan.plainly, prefix=plan.prefix)
    if plan.transport is Transport.GRPC:
        return _over_grpc(plan, access)
    if plan.tls or plan.plainly or len(plan.endpoints) > 1:
        return EtcdStore(plan.endpoints, access, deadline_s)
    from elaunch.launcher.store.keyring import Keyring
    from elaunch.rendezvous.etcd.discovery import FoundStore

    try:
        return FoundStore(
            plan.endpoints[0],
            plan.token,
            access,
            deadline_s,
            expects_ours=plan.serving is not Serving.NOTHING,
            keyring=Keyring(),
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


def _number(address: str, planned: Planned, say: Callable[[str], None]) -> str:
    """The address behind a name that the command line gives this node."""
    from elaunch.launcher.network.reach import NoAddress, addresses, is_address, is_loopback

    if is_address(address):
        return address
    with suppress(NoAddress):
        if found := next((each for each in addresses(address) if not is_loopback(each)), None):
            return found
    return _own_address(planned, say)


def _network(address: str, say: Callable[[str], None]) -> dict[str, str]:
    from elaunch.launcher.network.gloo import VARIABLE, gloo_interface

    found = gloo_interface(address) if VARIABLE not in os.environ else None
    if found is None:
        return {}
    interface, why = found
    say(f"{VARIABLE}={interface} is set for the workers: {why}")
    return {VARIABLE: interface}


def _own_address(planned: Planned, say: Callable[[str], None]) -> str:
    from elaunch.launcher.network.reach import AddressUnclear, NoAddress, own_address

    plan = planned.plan
    # The name may be that of a node whose agent is still to be started, as by Kubernetes.
    patience_s = plan.times.join_timeout_s if planned.cluster else _ADDRESS_WAIT_S
    end_s = time.monotonic() + min(patience_s, plan.times.join_timeout_s)
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
