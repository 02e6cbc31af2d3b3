"""MPI: processes that mpirun, mpiexec or prterun starts, of Open MPI, Hydra (MPICH, Intel MPI) or PALS (Cray)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from elaunch.launcher.schedulers.facts import Cluster, number, of_lines, of_lsf, of_slurm, port_of_name, used

_OMPI = "OMPI_COMM_WORLD_"
# Each launcher's variables of rank, size, local rank and local size, which it always sets together.
_LAUNCHERS = {
    "Open MPI": (f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    "MPI (PALS)": ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "MPI (Hydra)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def detect(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts that mpirun gives its processes. On each node one process is the agent, and the others wait for it."""
    for name, names in _LAUNCHERS.items():
        found = [number(environ, each) for each in names]
        if None in found:
            continue
        rank, size, task, tasks = (value or 0 for value in found)
        tasks = max(tasks, 1)
        nodes = number(environ, "OMPI_MCA_orte_num_nodes") or _of_equal_nodes(name, size, tasks)
        head, run_id = _head(environ, read) if nodes > 1 else None, _run_id(environ)
        is_lost = nodes > 1 and not head
        return Cluster(
            name,
            nodes=(nodes, nodes),
            # With several processes on a node, the mapping (by slot or node) decides the node. Rank 0 is on node 0.
            node_index=rank if tasks == 1 or rank == 0 else None,
            head=head,
            head_port=port_of_name(run_id) if run_id else None,
            workers=tasks if tasks > 1 else None,
            run_id=run_id,
            task=task,
            tasks=tasks,
            sources=used(environ, *names),
            note=f"{name} does not say where rank 0 runs: export MASTER_ADDR=HOST (mpirun -x)" if is_lost else "",
        )
    return None


def _of_equal_nodes(name: str, size: int, tasks: int) -> int:
    if size % tasks:
        raise ValueError(
            f"{name} has {size} processes, {tasks} of them here: the nodes are not alike, and how many there are is"
            " not to be known; start one process on each (mpirun --map-by ppr:1:node)"
        )
    return size // tasks


def _head(environ: Mapping[str, str], read: Callable[[str], str]) -> str | None:
    """The host of rank 0: MASTER_ADDR if the user set it, as scripts for torch do, else the allocation's first host."""
    if address := environ.get("MASTER_ADDR"):
        return address
    if hosts := of_slurm(environ, "SLURM_JOB_NODELIST"):
        return hosts[0]
    if hosts := of_lsf(environ):
        return hosts[0]
    return next(iter(of_lines(read(environ["PBS_NODEFILE"]))), None) if environ.get("PBS_NODEFILE") else None


def _run_id(environ: Mapping[str, str]) -> str | None:
    """The allocation's number, and MPI's name for this run in the allocation."""
    allocation = [environ[name] for name in used(environ, "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")]
    run = [environ[name] for name in used(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")]
    words = [*allocation[:1], *run[:1]]
    return re.sub(r"[^\w.]+", "-", "-".join(["mpi", *words])) if words else None
