"""PBS Pro, OpenPBS and Torque: processes that `pbsdsh` starts on the nodes of a job, and the job's script."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.launcher.cluster.cluster import Cluster, number, port_of_name, used
from elaunch.launcher.cluster.schedulers.hostlist import of_lines, place_of


def detect(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The nodes are those of PBS_NODEFILE, in its order. The job's script is task 1 and gets no nodes.

    Raises ValueError if PBS_NODEFILE is missing in another task, or does not have this host.
    """
    job = environ.get("PBS_JOBID")
    if not job:
        return None
    path = environ.get("PBS_NODEFILE")
    hosts = of_lines(read(path)) if path else []
    # In an array the id is 12[3].server.
    run_id = "pbs-" + job.replace("[", "_").replace("]", "")
    is_script = number(environ, "PBS_TASKNUM") in (None, 1)
    if not hosts and not is_script:
        raise ValueError(
            f"PBS_TASKNUM={environ['PBS_TASKNUM']} is one of several tasks, and no PBS_NODEFILE says which nodes have"
            " them: have the script copy its own to a disk that all nodes share, and name the copy in that variable"
        )
    if len(hosts) < 2 or is_script:
        others = f"its {len(hosts)} nodes are not used: pbsdsh -u elaunch … starts on all"
        note = f"this is the script of PBS's job {job}, and {others}" if len(hosts) > 1 else ""
        return Cluster("PBS", run_id=run_id, sources=used(environ, "PBS_JOBID", "PBS_NODEFILE"), note=note)
    index = place_of(hostname, hosts)
    if index is None:
        raise ValueError(f"this host, {hostname}, is none of those in PBS_NODEFILE={path}: {' '.join(hosts)}")
    return Cluster(
        "PBS",
        nodes=(len(hosts), len(hosts)),
        node_index=index,
        head=hosts[0],
        head_port=port_of_name(run_id),
        run_id=run_id,
        sources=used(environ, "PBS_JOBID", "PBS_NODEFILE", "PBS_TASKNUM"),
    )
