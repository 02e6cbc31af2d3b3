"""The objects of a Kubernetes job as data: those of deploy/k8s, made for one command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

# Seconds between the workers' end and the pod's end: for their logs, and to tell the other nodes.
_LEAVE_S = 15
_FOLDER = "/etc/elaunch/etcd"
_CONTAINER = "elaunch"


@dataclass(frozen=True)
class PodJob:
    """The job to run, and its resources.

    `instance` distinguishes this submission from an earlier one of the same `name`, whose pods may still run. It is the
    pods' label, and the name of the objects beside the Job.
    `nodes` is the least and the largest number of pods. `gpus`, `cpus` and `memory` are one pod's, empty if not given.
    `etcd` holds endpoints. If it is empty, the first pod serves the store, and clients need the token in the Secret
    `token_secret`. `claims` are volumes with their mount paths. `variables` are further variables of the container.
    With `is_closed`, only the job's own pods can connect to its pods. `is_writable` says whether the program can write
    into the image's folders.
    """

    name: str
    instance: str
    image: str
    command: tuple[str, ...]
    nodes: tuple[int, int]
    gpus: str = ""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str = ""
    memory: str = ""
    shm: str = "1Gi"
    stop_grace_s: int = 45
    etcd: str = ""
    etcd_secret: str = ""
    token_secret: str = ""
    claims: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    is_closed: bool = True
    is_writable: bool = False

    @property
    def is_elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1]

    @property
    def has_token(self) -> bool:
        return self.nodes[1] > 1 and not self.etcd


def job(asked: PodJob) -> Object:
    """The Job, with indexed pods. deploy/k8s/base/job.yaml has the reason for each setting."""
    count = asked.nodes[1]
    spec: Object = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": 20,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [1, 2]},
                },
            ]
        },
    }
    if asked.is_elastic:
        spec["successPolicy"] = {"rules": [{"succeededCount": 1}]}
    spec["template"] = {"metadata": {"labels": labels(asked.instance)}, "spec": _pod(asked)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(asked, asked.name), "spec": spec}


def suspended(job: Object) -> Object:
    """`job` in the suspended state, in which it has no pods."""
    return {**job, "spec": {"suspend": True, **job["spec"]}}


def companions(asked: PodJob, token: str = "") -> list[Object]:
    """The objects beside the Job: a Service, a NetworkPolicy, a PodDisruptionBudget, and a Secret for `token`."""
    made: list[Object] = []
    if token:
        secret = {"metadata": _metadata(asked, asked.token_secret), "stringData": {"token": token}}
        made.append({"apiVersion": "v1", "kind": "Secret", **secret})
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(asked.instance),
        "ports": [{"name": "store", "port": 2379}],
    }
    made.append({"apiVersion": "v1", "kind": "Service", "metadata": _metadata(asked, asked.instance), "spec": service})
    if asked.is_closed:
        own = {"matchLabels": labels(asked.instance)}
        policy = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
        kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
        made.append({**kind, "metadata": _metadata(asked, asked.instance), "spec": policy})
    if asked.is_elastic:
        budget = {"minAvailable": asked.nodes[0], "selector": {"matchLabels": labels(asked.instance)}}
        kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
        made.append({**kind, "metadata": _metadata(asked, asked.instance), "spec": budget})
    return made


def owned(made: list[Object], owner: Object, uid: str) -> list[Object]:
    """The objects in `made` with an owner: Kubernetes deletes them together with it."""
    reference = {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"], "uid": uid,
    }  # fmt: skip
    return [{**each, "metadata": {**each["metadata"], "ownerReferences": [reference]}} for each in made]


def literal(text: str) -> str:
    """`text` escaped for a manifest: Kubernetes would replace $(NAME) by a variable's value."""
    return text.replace("$", "$$")


def labels(instance: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "elaunch", "app.kubernetes.io/instance": instance}


def _metadata(asked: PodJob, name: str) -> Object:
    return {"name": name, "labels": labels(asked.instance)}


def _pod(asked: PodJob) -> Object:
    user = 1000
    gone = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    return {
        "subdomain": asked.instance,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": asked.stop_grace_s + _LEAVE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [{"key": f"node.kubernetes.io/{what}", **gone} for what in ("not-ready", "unreachable")],
        "containers": [_container(asked)],
        "volumes": [
            *([{"name": "etcd", "secret": _secret_files(asked.etcd_secret)}] if asked.etcd_secret else []),
            *([{"name": "tmp", "emptyDir": {}}] if _has_own_tmp(asked) else []),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": asked.shm}},
            # A number names a volume: a claim's name may be shm, or too long for a volume.
            *(
                {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": name}}
                for i, (name, _) in enumerate(asked.claims)
            ),
        ],
    }


def _has_own_tmp(asked: PodJob) -> bool:
    """Whether no claim is mounted at /tmp."""
    return "/tmp" not in (place.rstrip("/") for _, place in asked.claims)


def _secret_files(name: str) -> Object:
    return {"secretName": name, "defaultMode": 0o440}


def _container(asked: PodJob) -> Object:
    requests = {"cpu": asked.cpus, "memory": asked.memory}
    limits = {"memory": asked.memory, asked.gpu_resource: asked.gpus}
    resources = {"requests": _filled(requests), "limits": _filled(limits)}
    return {
        "name": _CONTAINER,
        "image": asked.image,
        "command": ["elaunch"],
        "args": [literal(word) for word in asked.command],
        "env": _variables(asked),
        **({"resources": resources} if any(resources.values()) else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": not asked.is_writable,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            *([{"name": "etcd", "mountPath": _FOLDER, "readOnly": True}] if asked.etcd_secret else []),
            *([{"name": "tmp", "mountPath": "/tmp"}] if _has_own_tmp(asked) else []),
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": f"claim-{i}", "mountPath": place} for i, (_, place) in enumerate(asked.claims)),
        ],
    }


def _filled(values: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _variables(asked: PodJob) -> list[Object]:
    values = {"PET_NNODES": ":".join(str(number) for number in dict.fromkeys(asked.nodes))}
    if asked.etcd:
        values["ELAUNCH_ENDPOINT"] = asked.etcd
    if asked.etcd_secret:
        names = {"CACERT": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
        values |= {f"ETCDCTL_{name}": f"{_FOLDER}/{file}" for name, file in names.items()}
    if not asked.is_writable and "HOME" not in dict(asked.variables):
        # Libraries write caches into HOME, and the image's folders are read-only.
        values["HOME"] = "/tmp"
    uid = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    token = {"secretKeyRef": {"name": asked.token_secret, "key": "token"}}
    return [
        *({"name": name, "value": literal(value)} for name, value in values.items()),
        # A Job that is created again under the same name is another job.
        {"name": "PET_RUN_ID", "valueFrom": uid},
        {"name": "PET_STOP_GRACE", "value": str(asked.stop_grace_s)},
        *([{"name": "ELAUNCH_TOKEN", "valueFrom": token}] if asked.has_token else []),
        *({"name": name, "value": literal(value)} for name, value in asked.variables),
    ]
