"""Makes the plan of the rendezvous from options and variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from elaunch.launcher.options.options import Options, Source
from elaunch.launcher.store.plan_times import with_hang_times
from elaunch.launcher.store.rendezvous_plan import Planned, RendezvousPlan
from elaunch.launcher.store.store_address import bare_host, static_master
from elaunch.rendezvous.times import Times

if TYPE_CHECKING:
    from elaunch.launcher.cluster.cluster import Cluster

_ALONE = "one node needs no rendezvous"


def plan(
    options: Options, environ: Mapping[str, str], read_secret: Callable[[str], str], cluster: Cluster | None = None
) -> Planned:
    """Decide how this node takes part. `read_secret` reads a file that holds a token or password. Raises UsageError."""
    if options.standalone or options.nnodes[1] == 1:
        return replace(_plan_for_one_node(options), cluster=cluster)
    # Imported here: a job of one node starts without it.
    from elaunch.launcher.store.nodes_plan import plan_for_nodes

    return plan_for_nodes(options, environ, read_secret, cluster)


def _plan_for_one_node(options: Options) -> Planned:
    """The plan of a job on one node, which needs no store. A static job still takes its master from the endpoint."""
    asked = [name for name in ("rdzv_backend", "rdzv_endpoint", "rdzv_conf") if name in options.given]
    if options.standalone or options.rdzv_backend == "static":
        asked = []
    asked += [name for name in ("store", "token_file") if options.given.get(name) is Source.COMMAND_LINE]
    master = static_master(options) if options.rdzv_backend == "static" and not options.standalone else None
    return Planned(
        RendezvousPlan(
            times=with_hang_times(
                options, Times.for_lease(stop_grace_s=options.stop_grace, failure_grace_s=options.failure_grace)
            ),
            master_addr=master.host if master else bare_host(options.master_addr),
            local_addr=bare_host(options.local_addr),
        ),
        tuple((f"--{name.replace('_', '-')}", _ALONE) for name in asked),
        master_port=master.port if master else None,
    )
