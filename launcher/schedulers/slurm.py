"""Slurm: the tasks of a step, as `srun` starts them, and the shells of `sbatch` and `salloc`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from elaunch.launcher.schedulers.facts import Cluster, HeadQuery, number, of_slurm, port_of, used

# Larger numbers stand for a batch script or an interactive shell, which are not real steps.
_STEP_MAX = 0xFFFF_FFF0
# Each step of a job gets a port of its own, and so does each of several consecutive jobs.
_STEPS_APART = 7
_SLURM = Cluster("Slurm", signals_workers=True, cores_option="--cpus-per-task")


def detect(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """What `srun` tells one of its tasks. In a job's shell only the job's name is known. Needs no `scontrol`."""
    job = number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    name = _job_name(environ, job)
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or step >= _STEP_MAX or "SLURM_PROCID" not in environ or _is_of_another_job(environ):
        return _shell(environ, job, name)
    if (components := number(environ, "SLURM_HET_SIZE") or 1) > 1:
        raise ValueError(
            f"SLURM_HET_SIZE={components}: a heterogeneous job, whose components know nothing of each other here; give"
            " --scheduler none, --nnodes and --rdzv-endpoint HOST:PORT"
        )
    nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    index = number(environ, "SLURM_NODEID") or 0
    tasks = _tasks_here(environ, index)
    # How many GPUs this node was given; None if the job asked for none. A step may have 0 in a job that has some.
    gpus = number(environ, "SLURM_GPUS_ON_NODE")
    seen = used(environ, "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hosts = of_slurm(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    head = next(iter(hosts), None) if nodes > 1 else None
    return replace(
        _SLURM,
        nodes=(nodes, nodes),
        node_index=index,
        head=head,
        head_port=port_of(job * _STEPS_APART + step),
        workers=gpus or (tasks if tasks > 1 else None),
        gpus=gpus,
        own_gpus=len(environ[seen[0]].split(",")) if gpus and seen else None,
        run_id=f"{name}.{step}",
        restarts=number(environ, "SLURM_RESTART_COUNT") or 0,
        task=number(environ, "SLURM_LOCALID") or 0,
        tasks=tasks,
        sources=used(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_NODEID"),
        head_query=HeadQuery(("scontrol", "--oneliner", "show", "node", head), _node_address) if head else None,
        gpus_way_out=(
            f"start one task on each node with all of them (srun --ntasks-per-node=1 --gpus-per-node={gpus} elaunch …),"
            " or add --gpu-bind=none to srun"
        ),
    )


def _node_address(said: str) -> str | None:
    """The address in the output of `scontrol show node`. A node's name in Slurm need not be a host name."""
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else None


def _job_name(environ: Mapping[str, str], job: int) -> str:
    """The job's name as users know it (12_3 in an array), after the cluster's: several clusters may use one store."""
    array, index = (environ.get(f"SLURM_ARRAY_{word}_ID", "") for word in ("JOB", "TASK"))
    return f"{environ.get('SLURM_CLUSTER_NAME') or 'slurm'}-{f'{array}_{index}' if array and index else job}"


def _shell(environ: Mapping[str, str], job: int, name: str) -> Cluster:
    nodes = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    note = (
        f"this is the shell of Slurm's job {job}, and its {nodes} nodes are not used: srun elaunch … starts on all"
        if nodes > 1
        else ""
    )
    return replace(_SLURM, run_id=name, sources=used(environ, "SLURM_JOB_ID"), note=note)


def _is_of_another_job(environ: Mapping[str, str]) -> bool:
    """Whether the step's variables belong to another job.

    A script that was submitted from within a step inherits the variables of that step, except those of its job.
    """
    step, job = of_slurm(environ, "SLURM_STEP_NODELIST"), of_slurm(environ, "SLURM_JOB_NODELIST")
    return bool(job) and not set(step) <= set(job)


def _tasks_here(environ: Mapping[str, str], index: int) -> int:
    """How many tasks the step has on node `index`: `4(x2),3` is 4, 4 and 3."""
    variable = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(variable, "")
    for word in text.split(",") if text else ():
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", word)
        if not found:
            raise ValueError(f"{variable}={text[:200]} is no list of numbers of tasks")
        index -= int(found[2] or 1)
        if index < 0:
            return int(found[1])
    return 1
