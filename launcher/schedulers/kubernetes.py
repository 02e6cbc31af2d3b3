"""Kubernetes: pods of an indexed Job (also of a JobSet or Kubeflow), of a LeaderWorkerSet, or of a StatefulSet.

Only a LeaderWorkerSet tells its pods how many they are. For the others the number comes from --nnodes, or from
PET_NNODES, which Kubeflow also sets. If an operator names the head itself, as PyTorchJob's does, its choice is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from elaunch.launcher.schedulers.facts import Cluster, number, used

HOSTS = "/etc/hosts"


def detect(environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts in the pod's variables and name. None outside of such a pod."""
    if environ.get("LWS_LEADER_ADDRESS"):
        return _of_leader_worker_set(environ)
    index = number(environ, "JOB_COMPLETION_INDEX")
    if index is not None:
        # An operator may give its pods any names. A name tells the head only if it ends in the index.
        is_numbered = hostname.endswith(f"-{index}")
        named = _by_name(_full_name(hostname, read), index) if is_numbered else (None, None)
        return _cluster("Kubernetes Job", index, named, used(environ, "JOB_COMPLETION_INDEX"))
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    if operators := used(environ, "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"):
        # Its PET_ variables are read as options.
        return Cluster("Kubernetes operator", sources=operators, is_of_pods=True)
    if environ.get("MASTER_ADDR"):
        return None
    # Any other pod belongs to a StatefulSet if its name ends in a number and it has a service's domain.
    ordinal, name = re.search(r"-([0-9]{1,6})$", hostname), _full_name(hostname, read)
    if not ordinal or "." not in name:
        return None
    index = int(ordinal[1])
    return _cluster("Kubernetes StatefulSet", index, _by_name(name, index), ("the pod's name",))


def _cluster(kind: str, index: int, named: tuple[str | None, str | None], sources: tuple[str, ...]) -> Cluster:
    head, run_id = named
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
        run_id=_run_id(leader, domain),
        sources=used(environ, "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
        is_of_pods=True,
    )


def _by_name(name: str, index: int) -> tuple[str | None, str]:
    """The head's and the job's name, from a pod's full name with its index: `train-3.train.team.svc.cluster.local`.

    The head is None for a pod without a service: other pods cannot resolve its name.
    """
    pod, _, domain = name.partition(".")
    group = pod.removesuffix(f"-{index}")
    return f"{group}-0.{domain}" if domain else None, _run_id(group, domain)


def _run_id(name: str, domain: str) -> str:
    """The job's name with its namespace, since several namespaces may use one store. `domain` is `train.team.svc…`."""
    labels = domain.split(".")
    return f"{labels[1]}-{name}" if len(labels) > 1 else name


def _full_name(hostname: str, read: Callable[[str], str]) -> str:
    """The pod's name with its service's domain, if it has one. The kubelet writes it into the pod's hosts file."""
    try:
        lines = read(HOSTS).splitlines()
    except OSError:
        return hostname
    for line in lines:
        for name in line.partition("#")[0].split()[1:]:
            if name.startswith(f"{hostname}."):
                return name
    return hostname
