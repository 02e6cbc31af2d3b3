"""Finds the scheduler that started this process, and its facts about the job. Pure: all inputs are arguments."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.hostlist import expand
from elaunch.launcher.schedulers.facts import (
    Cluster,
    Detect,
    HeadQuery,
    index_of,
    number,
    of_lines,
    of_lsf,
    of_slurm,
    port_of,
    port_of_name,
    used,
)
from elaunch.strict_json import parse_json

# A worker inherits it from its agent. It shows a launcher inside the worker that the scheduler's variables are those
# that the agent was started with: `srun`, `mpirun` and `sbatch` inside the worker set others.
_MARK = "ELAUNCH_SCHEDULER"
_FLUX_FAILED = (
    "flux job info does not report the hosts of this job, and the nodes need an endpoint: flux must be on the"
    " PATH of the job's tasks, or give --rdzv-endpoint HOST:PORT"
)
_OMPI = "OMPI_COMM_WORLD_"
# Each launcher's variables of rank, size, local rank and local size, which it always sets together.
_LAUNCHERS = {
    "Open MPI": (f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    "MPI (PALS)": ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "MPI (Hydra)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# Larger numbers stand for a batch script or an interactive shell, which are not real steps.
_STEP_MAX = 0xFFFF_FFF0
# Each step of a job gets a port of its own, and so does each of several consecutive jobs.
_STEPS_APART = 7
_SLURM = Cluster("Slurm", signals_workers=True, cores_option="--cpus-per-task")
HOSTS_FILE = "/etc/hosts"
# The scheduler that `elaunch --hosts` is for the nodes that it starts.
HOSTS, HOSTS_VARIABLE = "hosts", "ELAUNCH_HOSTS"


def mark_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable with a checksum of the schedulers' variables in `environ`; empty without any."""
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
            raise UsageError(f"{error}; correct the variable of {name}, or ignore it: --scheduler none") from None
    if choice != "auto":
        raise UsageError(f"--scheduler {choice} finds none of its variables; start elaunch under it, or drop that")
    return None


def _detect_hosts(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts that `elaunch --hosts` gives each node. Raises ValueError for others."""
    index, nodes, head, run_id = environ.get(HOSTS_VARIABLE, "").split()
    return Cluster(
        "--hosts",
        nodes=(int(nodes), int(nodes)),
        node_index=int(index),
        head=head,
        head_port=port_of_name(run_id),
        run_id=run_id,
        sources=(HOSTS_VARIABLE,),
    )


def _detect_mpi(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts of a process started by mpirun, mpiexec or prterun of Open MPI, MPICH, Intel MPI or PALS (Cray).

    On each node one process is the agent, and the others wait for it.
    """
    for name, names in _LAUNCHERS.items():
        found = [number(environ, each) for each in names]
        if None in found:
            continue
        rank, size, task, tasks = (value or 0 for value in found)
        tasks = max(tasks, 1)
        nodes = number(environ, "OMPI_MCA_orte_num_nodes")
        if not nodes and size % tasks:
            raise ValueError(
                f"{name} has {size} processes, {tasks} of them here: the nodes are not alike, and their number is"
                " unknown; start one process on each (mpirun --map-by ppr:1:node)"
            )
        nodes = nodes or size // tasks
        head, run_id = _head_of_mpi(environ, read) if nodes > 1 else None, _run_id_of_mpi(environ)
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
            note=f"{name} does not report where rank 0 runs: export MASTER_ADDR=HOST (mpirun -x)" if is_lost else "",
        )
    return None


def _head_of_mpi(environ: Mapping[str, str], read: Callable[[str], str]) -> str | None:
    """The host of rank 0: MASTER_ADDR if the user set it, as scripts for torch do, else the allocation's first host."""
    if address := environ.get("MASTER_ADDR"):
        return address
    hosts = of_slurm(environ, "SLURM_JOB_NODELIST") or of_lsf(environ)
    if not hosts and (path := environ.get("PBS_NODEFILE")):
        hosts = of_lines(read(path))
    return next(iter(hosts), None)


def _run_id_of_mpi(environ: Mapping[str, str]) -> str | None:
    """The allocation's number, and MPI's name for this run in the allocation."""
    allocation = [environ[name] for name in used(environ, "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")]
    run = [environ[name] for name in used(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")]
    names = [*allocation[:1], *run[:1]]
    return re.sub(r"[^\w.]+", "-", "-".join(["mpi", *names])) if names else None


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
            f"FLUX_JOB_SIZE={size} tasks are not shared evenly by FLUX_JOB_NNODES={nodes} nodes, and Flux does not give"
            " a task its node's task count; start one task on each node (flux run -N NODES --tasks-per-node=1), or"
            " the same number"
        )
    # The id without the ƒ before each number. If Flux itself runs in a job, the numbers of the outer jobs come first.
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
        head_query=HeadQuery(("flux", "job", "info", job, "R"), _first_host, _FLUX_FAILED) if nodes > 1 else None,
        cores_option="--exclusive or --cores-per-task",
    )


def _first_host(output: str) -> str | None:
    """The first host of a resource set, where the job's first task runs. None if the text is not a resource set."""
    with suppress(ValueError):
        match parse_json(output):
            case {"execution": {"nodelist": [str(hosts), *_]}}:
                return expand(hosts)[0]
    return None


def _detect_slurm(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts that `srun` gives one of its tasks. In a shell of `sbatch` or `salloc` only the job's name is known."""
    job = number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    name = _slurm_name(environ, job)
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or step >= _STEP_MAX or "SLURM_PROCID" not in environ or _is_of_another_job(environ):
        return _slurm_shell(environ, job, name)
    if (components := number(environ, "SLURM_HET_SIZE") or 1) > 1:
        raise ValueError(
            f"SLURM_HET_SIZE={components}: a heterogeneous job, whose components cannot find each other here; give"
            " --scheduler none, --nnodes and --rdzv-endpoint HOST:PORT"
        )
    nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    index = number(environ, "SLURM_NODEID") or 0
    tasks = _slurm_tasks(environ, index)
    # How many GPUs this node was given; None if the job asked for none. A step may have 0 in a job that has some.
    gpus = number(environ, "SLURM_GPUS_ON_NODE")
    seen = used(environ, "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    hosts = of_slurm(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    head = next(iter(hosts), None) if nodes > 1 else None
    switches = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
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
        # Without the node, which is its last part (srun(1)). A node's name may have dots too.
        topology=".".join(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:switches]).strip("."),
        task=number(environ, "SLURM_LOCALID") or 0,
        tasks=tasks,
        sources=used(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_NODEID"),
        head_query=HeadQuery(("scontrol", "--oneliner", "show", "node", head), _node_address) if head else None,
        gpus_way_out=(
            f"start one task on each node with all of them (srun --ntasks-per-node=1 --gpus-per-node={gpus} elaunch …),"
            " or add --gpu-bind=none to srun"
        ),
    )


def _node_address(output: str) -> str | None:
    """The address in the output of `scontrol show node`. A node's name in Slurm need not be a host name."""
    found = re.search(r"\bNodeAddr=(\S+)", output)
    return found[1] if found else None


def _slurm_name(environ: Mapping[str, str], job: int) -> str:
    """The job's name as users know it (12_3 in an array), after the cluster's: several clusters may use one store."""
    array, index = (environ.get(f"SLURM_ARRAY_{word}_ID", "") for word in ("JOB", "TASK"))
    return f"{environ.get('SLURM_CLUSTER_NAME') or 'slurm'}-{f'{array}_{index}' if array and index else job}"


def _slurm_shell(environ: Mapping[str, str], job: int, name: str) -> Cluster:
    nodes = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    note = (
        f"this is the shell of Slurm's job {job}, and its {nodes} nodes are not used: srun elaunch … starts on all"
        if nodes > 1
        else ""
    )
    return replace(_SLURM, run_id=name, sources=used(environ, "SLURM_JOB_ID"), note=note)


def _is_of_another_job(environ: Mapping[str, str]) -> bool:
    """Whether the step's variables belong to another job.

    A script that was submitted from within a step inherits that step's variables; only those of the job are its own.
    """
    step, job = of_slurm(environ, "SLURM_STEP_NODELIST"), of_slurm(environ, "SLURM_JOB_NODELIST")
    return bool(job) and not set(step) <= set(job)


def _slurm_tasks(environ: Mapping[str, str], index: int) -> int:
    """How many tasks the step has on node `index`: `4(x2),3` is 4, 4 and 3."""
    variable = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(variable, "")
    for word in text.split(",") if text else ():
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", word)
        if not found:
            raise ValueError(f"{variable}={text[:200]} is not a list of task counts")
        index -= int(found[2] or 1)
        if index < 0:
            return int(found[1])
    return 1


def _detect_lsf(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts that LSF gives a process. `blaunch` sets no node index: it is this host's position in the list.

    Raises ValueError if this host is not in the list.
    """
    job = number(environ, "LSB_JOBID")
    if job is None:
        return None
    hosts = of_lsf(environ)
    array = number(environ, "LSB_JOBINDEX") or 0
    run_id = f"lsf-{job}_{array}" if array else f"lsf-{job}"
    return Cluster(
        "LSF",
        nodes=(max(len(hosts), 1),) * 2,
        node_index=index_of(hostname, hosts, "LSB_MCPU_HOSTS") if len(hosts) > 1 else 0,
        head=hosts[0] if len(hosts) > 1 else None,
        head_port=port_of_name(run_id),
        run_id=run_id,
        sources=used(environ, "LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS"),
        note=f'start it once on every host: blaunch -z "{" ".join(hosts)}" elaunch …' if len(hosts) > 1 else "",
    )


def _detect_pbs(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The nodes are those of PBS_NODEFILE, in its order. The job's script is task 1 and gets no nodes.

    Raises ValueError if PBS_NODEFILE is missing in another task, or does not list this host.
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
            f"PBS_TASKNUM={environ['PBS_TASKNUM']} is one of several tasks, and no PBS_NODEFILE lists their nodes:"
            " have the script copy its own to a disk that all nodes share, and name the copy in that variable"
        )
    if len(hosts) < 2 or is_script:
        others = f"its {len(hosts)} nodes are not used: pbsdsh -u elaunch … starts on all"
        note = f"this is the script of PBS's job {job}, and {others}" if len(hosts) > 1 else ""
        return Cluster("PBS", run_id=run_id, sources=used(environ, "PBS_JOBID", "PBS_NODEFILE"), note=note)
    return Cluster(
        "PBS",
        nodes=(len(hosts), len(hosts)),
        node_index=index_of(hostname, hosts, f"PBS_NODEFILE={path}"),
        head=hosts[0],
        head_port=port_of_name(run_id),
        run_id=run_id,
        sources=used(environ, "PBS_JOBID", "PBS_NODEFILE", "PBS_TASKNUM"),
    )


def _detect_kubernetes(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts in the variables and the name of a pod; None for a pod of another kind.

    The kinds are an indexed Job (also of a JobSet or Kubeflow), a LeaderWorkerSet, and a StatefulSet. Only a
    LeaderWorkerSet's pods can read its size. For the others it comes from --nnodes, or from PET_NNODES,
    which Kubeflow also sets. If an operator names the head itself, as PyTorchJob's does, its choice is used.
    """
    if environ.get("LWS_LEADER_ADDRESS"):
        return _of_leader_worker_set(environ)
    index = number(environ, "JOB_COMPLETION_INDEX")
    if index is not None:
        kind, sources = "Kubernetes Job", used(environ, "JOB_COMPLETION_INDEX")
        # An operator may give its pods any names. A name identifies the head only if it ends in the index.
        name = _full_name(hostname, read) if hostname.endswith(f"-{index}") else ""
    else:
        if not environ.get("KUBERNETES_SERVICE_HOST"):
            return None
        if operators := used(environ, "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"):
            # Its PET_ variables are read as options.
            return Cluster("Kubernetes operator", sources=operators, is_of_pods=True)
        # Any other pod belongs to a StatefulSet if its name ends in a number and it has a service's domain.
        ordinal, name = re.search(r"-([0-9]{1,6})$", hostname), _full_name(hostname, read)
        if environ.get("MASTER_ADDR") or not ordinal or "." not in name:
            return None
        kind, index, sources = "Kubernetes StatefulSet", int(ordinal[1]), ("the pod's name",)
    head, run_id = _head_of_pods(name, index) if name else (None, None)
    return Cluster(kind, node_index=index, head=head, run_id=run_id, sources=sources, is_of_pods=True)


def _of_leader_worker_set(environ: Mapping[str, str]) -> Cluster:
    """The leader is node 0 and is called `set-2`. The other pods of its group are `set-2-1`, `set-2-2`, …"""
    head = environ["LWS_LEADER_ADDRESS"]
    leader, _, domain = head.partition(".")
    nodes, index = number(environ, "LWS_GROUP_SIZE"), number(environ, "LWS_WORKER_INDEX")
    return Cluster(
        "Kubernetes LeaderWorkerSet",
        nodes=(nodes, nodes) if nodes else None,
        node_index=index,
        head=head,
        run_id=_run_id_of_pods(leader, domain),
        sources=used(environ, "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
        is_of_pods=True,
    )


def _head_of_pods(name: str, index: int) -> tuple[str | None, str]:
    """The head's and the job's name, from a pod's full name with its index: `train-3.train.team.svc.cluster.local`.

    The head is None for a pod without a service: other pods cannot resolve its name.
    """
    pod, _, domain = name.partition(".")
    group = pod.removesuffix(f"-{index}")
    return f"{group}-0.{domain}" if domain else None, _run_id_of_pods(group, domain)


def _run_id_of_pods(name: str, domain: str) -> str:
    """The job's name with its namespace, since several namespaces may use one store. `domain` is `train.team.svc…`."""
    labels = domain.split(".")
    return f"{labels[1]}-{name}" if len(labels) > 1 else name


def _full_name(hostname: str, read: Callable[[str], str]) -> str:
    """The pod's name with its service's domain, if it has one. The kubelet writes it into the pod's hosts file."""
    try:
        lines = read(HOSTS_FILE).splitlines()
    except OSError:
        return hostname
    for line in lines:
        for name in line.partition("#")[0].split()[1:]:
            if name.startswith(f"{hostname}."):
                return name
    return hostname


# The prefixes of each scheduler's variables, and the function that reads them.
# The innermost scheduler comes first: mpirun and Flux run inside of an allocation, and Slurm's nodes may be pods.
SCHEDULERS: Mapping[str, tuple[tuple[str, ...], Detect]] = {
    HOSTS: ((HOSTS_VARIABLE,), _detect_hosts),
    "mpi": (("OMPI_COMM_WORLD_", "PMI_"), _detect_mpi),
    "flux": (("FLUX_",), _detect_flux),
    "slurm": (("SLURM_",), _detect_slurm),
    "lsf": (("LSB_",), _detect_lsf),
    "pbs": (("PBS_",), _detect_pbs),
    "kubernetes": (("LWS_", "JOB_COMPLETION_INDEX", "KUBERNETES_"), _detect_kubernetes),
}
