"""A scheduler's facts about a job and this node of it, and the parsers of schedulers' host lists."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elaunch.launcher.options.hostlist import expand

# Below Linux's ephemeral ports (32768 and up), above those of well-known services.
_PORT_FIRST, _PORT_PAIRS = 20_000, 5_000


@dataclass(frozen=True)
class HeadQuery:
    """A scheduler's command that reports the head, if its name is unknown or only the scheduler can resolve it.

    `parse` finds the head's name or address in the command's output, or returns None. `failed` is the error
    message for a job of several nodes whose head stays unknown.
    """

    command: tuple[str, ...]
    parse: Callable[[str], str | None]
    failed: str = ""


@dataclass(frozen=True)
class Cluster:
    """One scheduler's facts. None means that the scheduler does not set it: the command line or the host decides.

    `scheduler` is its name for the log. `nodes` is the smallest and the largest number of nodes. `node_index` is this
    node's index, from 0. Node 0 is the head, and `head` is its name or address for the other nodes. `head_port` is the
    port of the head's store; None means the usual port, since no two jobs can share a head. `workers` is this node's
    number of workers, if it is not one for each GPU. `gpus` is the number of GPUs that the node was given. This process
    alone may use `own_gpus` of them. `run_id` is the same on all nodes of a job, and after each restart of the job by
    the scheduler; `restarts` counts these. `topology` names the switches above this node, from the top.

    `task` is the index of this process among the `tasks` processes that the scheduler started for the job on this
    node. Only task 0 is an agent. `sources` are the variables that gave these facts. `note` is a sentence for the log.

    The last fields describe the scheduler. `is_of_pods`: pods share no home, only Kubernetes can give all of them a
    secret, and the head's name may be a service's. `signals_workers`: a notice of the job's end may go to
    all processes, including workers. `head_query` finds the head if the name in `head` cannot be resolved.
    `cores_option` requests more cores for an agent. `gpus_way_out` is how to give one agent all GPUs of its node.
    """

    scheduler: str
    nodes: tuple[int, int] | None = None
    node_index: int | None = None
    head: str | None = None
    head_port: int | None = None
    workers: int | None = None
    gpus: int | None = None
    own_gpus: int | None = None
    run_id: str | None = None
    restarts: int = 0
    topology: str = ""
    task: int = 0
    tasks: int = 1
    sources: tuple[str, ...] = ()
    note: str = ""
    is_of_pods: bool = False
    signals_workers: bool = False
    head_query: HeadQuery | None = None
    cores_option: str = ""
    gpus_way_out: str = ""


# A scheduler's detection. Its only inputs are the environment, this host's name, and a function that reads a small text
# file (OSError if it cannot). None: the scheduler did not start this process. ValueError: its variables make no sense.
Detect = Callable[[Mapping[str, str], str, Callable[[str], str]], Cluster | None]


def line(cluster: Cluster) -> str:
    """The facts as one line for the log."""
    nodes = ":".join(str(number) for number in dict.fromkeys(cluster.nodes or ()))
    parts = [
        f"job {cluster.run_id}" if cluster.run_id else "",
        f"start number {cluster.restarts + 1}" if cluster.restarts else "",
        f"{nodes} {'node' if nodes == '1' else 'nodes'}" if nodes else "",
        f"this is node {cluster.node_index}" if cluster.node_index is not None else "",
        f"the head is {cluster.head}" if cluster.head else "",
        f"topology {cluster.topology}" if cluster.topology else "",
        f"{cluster.workers} workers here" if cluster.workers else "",
    ]
    facts = ", ".join(part for part in parts if part) or "nothing that matters here"
    return f"{cluster.scheduler}: {facts} ({', '.join(cluster.sources)}); --scheduler none ignores it"


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set, as a number. Raises ValueError."""
    for name in names:
        if word := environ.get(name, "").strip():
            if not re.fullmatch("[0-9]+", word):
                raise ValueError(f"{name}={word} is not a number")
            return int(word)
    return None


def used(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Those of the variables that are set."""
    return tuple(name for name in names if environ.get(name))


def port_of(job: int) -> int:
    """A port for the store of job number `job`. Nearby numbers get different ports; the next port stays free."""
    return _PORT_FIRST + 2 * (job % _PORT_PAIRS)


def port_of_name(run_id: str) -> int:
    """A port for the store of a job that has only a name."""
    return port_of(zlib.crc32(run_id.encode(errors="surrogateescape")))


def of_slurm(environ: Mapping[str, str], *variables: str) -> list[str]:
    """The hosts in the first of the variables that is set."""
    for variable in variables:
        if text := environ.get(variable):
            try:
                return expand(text)
            except ValueError as error:
                raise ValueError(f"{variable}={text[:200]} {error}") from None
    return []


def of_lsf(environ: Mapping[str, str]) -> list[str]:
    """LSF's hosts, each once: `LSB_MCPU_HOSTS` is "host slots host slots …"; `LSB_HOSTS` has a word for each slot."""
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()[::2] or environ.get("LSB_HOSTS", "").split()
    return list(dict.fromkeys(hosts))


def of_lines(text: str) -> list[str]:
    """The hosts, each once, in a file with a line for each slot, like the file that PBS_NODEFILE names."""
    return list(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def index_of(hostname: str, hosts: list[str], source: str) -> int:
    """The index of `hostname` in the hosts of `source`, compared without domains if need be.

    Raises ValueError if it is missing or not unique.
    """
    if hostname in hosts:
        return hosts.index(hostname)
    short, mine = [host.partition(".")[0] for host in hosts], hostname.partition(".")[0]
    if short.count(mine) != 1:
        raise ValueError(f"this host, {hostname}, is not in {source}: {' '.join(hosts)}")
    return short.index(mine)
