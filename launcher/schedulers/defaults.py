"""The scheduler's facts about this process, as defaults of options that the command line leaves unset."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elaunch.launcher.errors import UsageError
from elaunch.launcher.host import NoAddress, addresses
from elaunch.launcher.options.options import Options, Source
from elaunch.launcher.options.values import ENDPOINT_VARIABLES
from elaunch.launcher.schedulers.detect import detect
from elaunch.launcher.schedulers.facts import Cluster

_CALL_S = 10.0


def cluster_of(options: Options, environ: Mapping[str, str]) -> Cluster | None:
    """A scheduler's facts about this process; None if there is none, or the user disabled it. Raises UsageError."""
    if options.standalone:
        return None
    found = detect(options.scheduler, environ, socket.gethostname(), lambda path: Path(path).read_text("utf-8"))
    return resolve_head(found) if found else None


def resolve_head(cluster: Cluster) -> Cluster:
    """`cluster` with a head that resolves, if the scheduler reports one. A node's name need not be a host name."""
    query = cluster.head_query
    if query is None or shutil.which(query.command[0]) is None:
        return cluster
    if cluster.head:
        with suppress(NoAddress):
            addresses(cluster.head)
            return cluster
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(query.command, capture_output=True, text=True, errors="replace", timeout=_CALL_S)
        return replace(cluster, head=query.parse(done.stdout) or cluster.head)
    return cluster


def facts_of_job(options: Options, cluster: Cluster, environ: Mapping[str, str]) -> Cluster:
    """The facts of `cluster` that are about this job.

    A job may have more nodes than the scheduler started here, and be given their endpoint. Then each node has a step or
    an allocation of its own, and the scheduler does not know the job's size, head or name.

    Raises UsageError if the job has several nodes and the scheduler does not report the head when it is queried.
    """
    is_given = {"rdzv_endpoint", "master_addr"} & set(options.given) or any(map(environ.get, ENDPOINT_VARIABLES))
    nodes_max = (options.nnodes if "nnodes" in options.given else cluster.nodes or options.nnodes)[1]
    if not is_given and nodes_max > 1 and cluster.head is None and cluster.head_query:
        raise UsageError(cluster.head_query.failed)
    if not is_given or cluster.nodes is None or cluster.tasks > 1 or options.nnodes[1] <= cluster.nodes[1]:
        return cluster
    note = f"this job has more nodes than {cluster.scheduler} started here; they meet at the given endpoint"
    return replace(cluster, nodes=None, node_index=None, head=None, run_id=None, note=note)


def settle(options: Options, cluster: Cluster) -> Options:
    """`options` with the size and the name that the scheduler gives. Raises UsageError for a contradiction."""
    least, started = options.nnodes[0], cluster.nodes[1] if cluster.nodes else 0
    if "nnodes" in options.given and least > started > 0:
        several = f", with {cluster.tasks} tasks on this one, of which one is the agent" if cluster.tasks > 1 else ""
        raise UsageError(
            f"{_source(options, 'nnodes')} {least} contradicts {cluster.scheduler}, which started this job on {started}"
            f" nodes{several}; leave --nnodes out, or lower it, or ask {cluster.scheduler} for {least} nodes"
            " (--scheduler none ignores it)"
        )
    # A variable in a batch script has the script's own value, which is the same on all nodes.
    has_other_rank = "node_rank" in options.given and cluster.node_index not in (None, options.node_rank)
    if has_other_rank and started > 1 and options.nnodes == cluster.nodes:
        raise UsageError(
            f"{_source(options, 'node_rank')} {options.node_rank} contradicts {cluster.scheduler}, where this is node"
            f" {cluster.node_index}; leave --node-rank out (a variable in a job's script is the script's own, the same"
            " for all nodes), or add --scheduler none"
        )
    if cluster.nodes and "nnodes" not in options.given:
        options = replace(options, nnodes=cluster.nodes)
    if cluster.run_id and options.run_id is None:
        options = replace(options, run_id=cluster.run_id)
    return options


def _source(options: Options, dest: str) -> str:
    is_variable = options.given.get(dest) is Source.ENVIRONMENT
    return f"PET_{dest.upper()}" if is_variable else f"--{dest.replace('_', '-')}"
