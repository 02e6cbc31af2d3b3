"""Flux: the tasks of a job, as `flux run`, `flux submit` and `flux batch` start them.

The variables are those of flux-environment(7). None of them names a host or counts the tasks of a node. So the hosts
are asked of Flux (`flux job info JOBID R`, RFC 20), and the number of tasks is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from elaunch.launcher.cluster.cluster import Cluster, HeadQuery, number, port_of_name, used
from elaunch.launcher.cluster.schedulers.hostlist import expand
from elaunch.strict_json import parse_json

# A job's number in F58, with ƒ or f in front. Some locales write other characters for ƒ, but no letters or digits.
_F58 = re.compile("(?:f|[^0-9A-Za-z]+)?([1-9A-Za-z]+)")


def detect(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts that Flux gives one of a job's tasks. None in the script of `flux batch`, which is not a task.

    Raises ValueError if the nodes cannot all have the same number of tasks.
    """
    job, rank = environ.get("FLUX_JOB_ID"), number(environ, "FLUX_TASK_RANK")
    if not job or rank is None:
        return None
    nodes, size = number(environ, "FLUX_JOB_NNODES") or 1, number(environ, "FLUX_JOB_SIZE") or 1
    task, tasks = number(environ, "FLUX_TASK_LOCAL_ID") or 0, size // nodes
    if size % nodes or task >= tasks:
        raise ValueError(
            f"FLUX_JOB_SIZE={size} tasks are not shared evenly by FLUX_JOB_NNODES={nodes} nodes, and Flux does not tell"
            " a task how many are beside it; start one task on each node (flux run -N NODES --tasks-per-node=1), or"
            " the same number"
        )
    run_id = _run_id(environ.get("FLUX_JOB_ID_PATH") or job)
    return Cluster(
        "Flux",
        nodes=(nodes, nodes),
        # With several tasks on a node, the mapping (--taskmap) decides a task's node. Rank 0 is always on node 0.
        node_index=rank if tasks == 1 or rank == 0 else None,
        head_port=port_of_name(run_id),
        workers=tasks if tasks > 1 else None,
        run_id=run_id,
        task=task,
        tasks=tasks,
        sources=used(environ, "FLUX_JOB_ID", "FLUX_JOB_NNODES", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
        head_query=HeadQuery(("flux", "job", "info", job, "R"), _first_host, _UNANSWERED) if nodes > 1 else None,
        cores_option="--exclusive or --cores-per-task",
    )


_UNANSWERED = (
    "flux job info does not tell the hosts of this job, and the nodes need a place where they meet: flux must be on the"
    " PATH of the job's tasks, or give --rdzv-endpoint HOST:PORT"
)


def _run_id(path: str) -> str:
    """The job's number without its ƒ. If Flux itself runs in a job, the numbers of the outer jobs come first."""
    found = [_F58.fullmatch(job) for job in path.strip("/").split("/")]
    if None in found:
        raise ValueError(f"FLUX_JOB_ID={path[:200]!r} is no number of a job")
    return "-".join(["flux", *(job[1] for job in found if job)])


def _first_host(said: str) -> str | None:
    """The first host of a resource set, where the job's first task runs. None if the text is not a resource set."""
    try:
        match parse_json(said):
            case {"execution": {"nodelist": [str(hosts), *_]}}:
                return expand(hosts)[0]
    except ValueError:
        pass
    return None
