"""What the command line says about the rendezvous."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from elaunch.rendezvous.endpoint import PREFIX, Endpoint, Login, Tls, Transport
from elaunch.rendezvous.times import Times

if TYPE_CHECKING:
    from elaunch.launcher.cluster.cluster import Cluster


class Serving(Enum):
    """The store that the head starts if nothing listens at the endpoint."""

    NOTHING = "nothing"
    MEMORY = "memory"
    ETCD = "etcd"


@dataclass(frozen=True)
class RendezvousPlan:
    """What the command line says about the rendezvous. Without endpoints this node is alone and needs no server.

    `token` is the job's secret, empty if nobody gave one; `token` and `login` are used if the store asks for them.
    `plainly` says that http:// was typed: the user means an etcd without TLS, and a login may be sent to it.
    `is_head` says whether this node serves the store if none listens; None means that the endpoint's address decides.
    With `node_rank` (static rendezvous) it decides the ranks, and which node is the head. `master_addr` is the job's
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
    serving: Serving = Serving.NOTHING
    is_head: bool | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None

    @property
    def own_addr(self) -> str | None:
        """The address at which other nodes reach this node, if the command line says one.

        MASTER_ADDR is the address of the node of rank 0; in a job of one node that is always this node.
        """
        is_first = self.is_alone or self.node_rank == 0
        return (self.master_addr if is_first else None) or self.local_addr

    @property
    def is_alone(self) -> bool:
        """One node with its store in its own memory."""
        return not self.endpoints


@dataclass(frozen=True)
class Planned:
    """The plan, with what the user should know about it.

    `ignored` are options without effect, each with the reason. `notes` are sentences for the user, shown once.
    `master_port` is the port in a static endpoint. `cluster` is what the scheduler says. `at_its_head` is true if the
    endpoint is the scheduler's head node, and nobody typed it. `hands_over` is true if the head sends the store's token
    to the other nodes, because the user gave none.
    """

    plan: RendezvousPlan
    ignored: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    master_port: int | None = None
    cluster: Cluster | None = None
    at_its_head: bool = False
    hands_over: bool = False
