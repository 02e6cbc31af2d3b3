"""Finds the scheduler that started this process, and its facts about the job. Pure: all inputs are arguments.

Flux, LSF and PBS are read here, the others in modules of their own.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping

from elaunch.launcher.errors import UsageError
from elaunch.launcher.schedulers import kubernetes, mpi, slurm
from elaunch.launcher.schedulers.facts import (
    Cluster,
    Detect,
    HeadQuery,
    expand,
    number,
    of_lines,
    of_lsf,
    place_of,
    port_of_name,
    used,
)
from elaunch.strict_json import parse_json

# A worker has it from its agent. A launcher that the worker starts knows by it that the scheduler's variables are those
# that the agent was started with. `srun`, `mpirun` and `sbatch` inside the worker set others.
_MARK = "ELAUNCH_SCHEDULER"
_UNANSWERED = (
    "flux job info does not tell the hosts of this job, and the nodes need a place where they meet: flux must be on the"
    " PATH of the job's tasks, or give --rdzv-endpoint HOST:PORT"
)


def mark_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that marks the schedulers' variables in `environ`; empty without any."""
    prefixes = tuple(prefix for each, _ in SCHEDULERS.values() for prefix in each)
    found = sorted(item for item in environ.items() if item[0].startswith(prefixes))
    return {_MARK: f"{zlib.crc32(repr(found).encode()):08x}"} if found else {}


def detect(choice: str, environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts from the scheduler called `choice`. With "auto", from the first one that started this process, or None.

    A launcher inside a worker was started by the worker, not by the scheduler that started the worker's agent.

    `read` returns the text of a small file, like PBS's list of nodes. Raises UsageError for variables that make no
    sense, and if the chosen scheduler did not start this process.
    """
    mark = environ.get(_MARK)
    if choice == "none" or (choice == "auto" and mark and mark == mark_of(environ).get(_MARK)):
        return None
    for name, (prefixes, facts_of) in SCHEDULERS.items():
        if choice not in ("auto", name) or not any(variable.startswith(prefixes) for variable in environ):
            continue
        try:
            if found := facts_of(environ, hostname, read):
                return found
        except (ValueError, OSError) as error:
            raise UsageError(
                f"{error}; correct what {name} is said to have set, or take no notice of it: --scheduler none"
            ) from None
    if choice != "auto":
        raise UsageError(f"--scheduler {choice} finds none of its variables; start elaunch by it, or leave that out")
    return None


def _detect_flux(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
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
    # Without the ƒ in front of each number. If Flux itself runs in a job, the numbers of the outer jobs come first.
    run_id = f"flux-{re.sub('[^0-9A-Za-z]+', '-', environ.get('FLUX_JOB_ID_PATH') or job).strip('-')}"
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


def _first_host(said: str) -> str | None:
    """The first host of a resource set, where the job's first task runs. None if the text is not a resource set."""
    try:
        match parse_json(said):
            case {"execution": {"nodelist": [str(hosts), *_]}}:
                return expand(hosts)[0]
    except ValueError:
        pass
    return None


def _detect_lsf(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts that LSF gives a process. `blaunch` sets no node index, so the host's name in the list gives it.

    Raises ValueError if this host is not in the list.
    """
    job = number(environ, "LSB_JOBID")
    if job is None:
        return None
    hosts = of_lsf(environ)
    index = place_of(hostname, hosts) if len(hosts) > 1 else 0
    if index is None:
        raise ValueError(f"this host, {hostname}, is none of those in LSB_MCPU_HOSTS: {' '.join(hosts)}")
    array = number(environ, "LSB_JOBINDEX") or 0
    run_id = f"lsf-{job}_{array}" if array else f"lsf-{job}"
    return Cluster(
        "LSF",
        nodes=(max(len(hosts), 1),) * 2,
        node_index=index,
        head=hosts[0] if len(hosts) > 1 else None,
        head_port=port_of_name(run_id),
        run_id=run_id,
        sources=used(environ, "LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS"),
        note=f'every host is to start it once: blaunch -z "{" ".join(hosts)}" elaunch …' if len(hosts) > 1 else "",
    )


def _detect_pbs(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
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


# What the names of each scheduler's variables begin with, and what reads them.
# The innermost scheduler comes first: mpirun and Flux run inside of an allocation, and Slurm's nodes may be pods.
SCHEDULERS: Mapping[str, tuple[tuple[str, ...], Detect]] = {
    "mpi": (("OMPI_COMM_WORLD_", "PMI_"), mpi.detect),
    "flux": (("FLUX_",), _detect_flux),
    "slurm": (("SLURM_",), slurm.detect),
    "lsf": (("LSB_",), _detect_lsf),
    "pbs": (("PBS_",), _detect_pbs),
    "kubernetes": (("LWS_", "JOB_COMPLETION_INDEX", "KUBERNETES_"), kubernetes.detect),
}
