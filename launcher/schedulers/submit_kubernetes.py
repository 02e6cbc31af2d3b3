"""`elaunch submit k8s`: makes an indexed Job of elaunch nodes, and the objects that it needs."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import click
import yaml

from elaunch.agent.environment import outside
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options import rdzv_conf, values
from elaunch.launcher.options.command_line import own
from elaunch.launcher.options.job_file import JobFile
from elaunch.launcher.options.options import JobCommand, Options, parse, typed_job, words_of
from elaunch.launcher.options.values import Address, endpoints
from elaunch.rendezvous.job_spec import ProgramKind
from elaunch.rendezvous.secret import new_token

Object = dict[str, Any]

# Seconds between the workers' end and the pod's end: for their logs, and to tell the other nodes.
_LEAVE_S = 15
_FOLDER = "/etc/elaunch/etcd"
_CONTAINER = "elaunch"
# A host name has at most 63 characters. The rest is for the submission's suffix: `name-1f2e3d`.
_NAME_MAX = 52

# Options of elaunch whose values the pods get in another way.
_NOT_HERE = {
    "nnodes": "follows from the number of pods; use --nodes instead",
    "node_rank": "is the pod's index; leave it out",
    "standalone": "is for a job on one node; use --nodes 1",
    "stop_grace": "follows from the pods' grace period; use --grace instead",
}


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


def _main(ctx: click.Context) -> int:
    """Submit the job, or print its manifests. Returns the exit code. Raises UsageError and SiteError."""
    asked = understand(ctx, secrets.token_hex(3))
    token = ""
    if asked.has_token and not ctx.params["token_secret"]:
        token = outside(ctx.obj.environ).get("ELAUNCH_TOKEN", "").strip() or new_token()
    namespace = ctx.params["namespace"]
    if ctx.params["dry_run"]:
        made = [*companions(asked, token), job(asked)]
        if namespace:
            made = [{**each, "metadata": {**each["metadata"], "namespace": namespace}} for each in made]
        sys.stdout.flush()
        sys.stdout.buffer.write(as_yaml(made).encode())
        return 0
    where = ["--namespace", namespace] if namespace else []
    _create(asked, token, where)
    for line in _announcement(asked, where):
        print(f"elaunch: {line}", file=sys.stderr)
    return 0


def understand(ctx: click.Context, suffix: str = "") -> PodJob:
    """The job that is asked for. `suffix` is unique to this submission. Raises UsageError, also if elaunch would."""
    given = ctx.params
    if not given["image"]:
        raise UsageError("--image is missing: the image holds elaunch and the program; see deploy/docker/Dockerfile")
    typed, program = typed_job(ctx)
    command = words_of(typed, program)
    for word in command:
        _check_utf8(word)
    nodes = given["nodes"]
    options = _checked_job(typed, command, nodes, dict(given["env"]))
    memory, shm = given["memory"] or "", given["shm"] or ""
    if memory and shm and _bytes(shm) > _bytes(memory):
        raise UsageError(
            f"--shm {shm} is more than --memory {memory}, and /dev/shm is part of the memory; ask for more memory, or"
            " for a smaller /dev/shm"
        )
    name = given["name"] or _name(options)
    instance = f"{name}-{suffix}" if suffix else name
    return PodJob(
        name=name,
        instance=instance,
        image=given["image"],
        command=tuple(command),
        nodes=nodes,
        gpus=str(given["gpus"] or ""),
        gpu_resource=given["gpu_resource"],
        cpus=given["cpus"] or "",
        memory=memory,
        shm=shm or _default_shm("16Gi" if given["gpus"] else "1Gi", memory),
        stop_grace_s=given["grace"],
        etcd=_etcd(given["etcd"] or (), given["etcd_secret"]),
        etcd_secret=given["etcd_secret"] or "",
        token_secret=given["token_secret"] or f"{instance}-token",
        claims=given["claim"],
        variables=given["env"],
        is_closed=not given["no_network_policy"],
        is_writable=given["writable_image"],
    )


def _checked_job(
    typed: Mapping[str, str], command: Sequence[str], nodes: tuple[int, int], variables: Mapping[str, str]
) -> Options:
    """The job's options. Raises UsageError where every pod would end with exit code 2 after it is scheduled."""
    for name, why in _NOT_HERE.items():
        variable = f"PET_{name.upper()}"
        if variable in variables:
            raise UsageError(f"--env {variable}={variables[variable]}: it {why}")
        if name in typed:
            raise UsageError(f"--{name.replace('_', '-')} {why}")
    # A job file is in the image, like the program. It is not read here.
    checked = parse(command, {"PET_NNODES": f"{nodes[0]}:{nodes[1]}", **variables}, lambda _: JobFile({}))
    rdzv_conf.understand(checked.rdzv_conf)
    if checked.target == "-":
        raise UsageError("- means a program on stdin, and pods have no stdin; name a file of the image")
    return checked


def _etcd(found: Sequence[Address], secret: str | None) -> str:
    """The endpoints for the pods, with https:// if there is a Secret with certificates. Raises UsageError."""
    if not secret:
        return ",".join(map(str, found))
    if not found:
        raise UsageError(f"--etcd-secret {secret} is for an etcd; give its address with --etcd HOST:PORT")
    if any(address.scheme == "http" for address in found):
        raise UsageError(
            f"--etcd {','.join(map(str, found))} means no TLS, and --etcd-secret {secret} is for TLS; use https://"
        )
    return ",".join(str(replace(address, scheme="https")) for address in found)


# The API server checks these names in the same way (RFC 1123). An image's name is only checked to be one word.
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_QUALIFIED = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?"


def _word(pattern: str, what_else: str) -> values.Convert:
    """A converter for words like `pattern`; an empty one counts as not given."""

    def convert(raw: values.Raw) -> str:
        if raw and not re.fullmatch(pattern, str(raw), re.ASCII):
            raise ValueError(what_else)
        return str(raw)

    return convert


def _pair(separator: str, metavar: str, pattern: str, what_else: str) -> values.Convert:
    """A converter for a name and a value, as a pair."""

    def convert(raw: values.Raw) -> tuple[str, str]:
        name, found, value = str(raw).partition(separator)
        if not (name and found) or (separator == ":" and not value.startswith("/")):
            raise ValueError(f"is not {metavar}")
        if not re.fullmatch(pattern, name):
            raise ValueError(what_else)
        _check_utf8(value)
        return name, value

    return convert


def _check_utf8(word: str) -> None:
    """Raises UsageError for bytes that a manifest cannot hold. Python keeps them as lone surrogates."""
    if re.search(r"[\ud800-\udfff]", word):
        raise UsageError(f"{word!r} is not UTF-8, and a manifest must be; put it into a file of the image")


_IMAGE = _word(r"[A-Za-z0-9][\w.:/@+-]*", "is not the name of an image, as registry/name:tag")
_NAME = _word(
    rf"(?=.{{1,{_NAME_MAX}}}$)[a-z]([-a-z0-9]*[a-z0-9])?",
    f"is not a host name; use up to {_NAME_MAX} small letters, digits and dashes, with a letter first",
)
_NAMESPACE = _word(_LABEL, "is not the name of a namespace: small letters, digits and dashes")
_RESOURCE = _word(_QUALIFIED, "is not the name of a resource, as nvidia.com/gpu")
_SECRET = _word(_SUBDOMAIN, "is not the name of a Secret: small letters, digits, dashes and dots")
_QUANTITY = _word(
    r"[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTP]i?|Ki)?", "is not a quantity of Kubernetes; give one like 8, 500m or 64Gi"
)
# The volume has the same name, and a volume's name must not have dots.
_CLAIM = _pair(":", "NAME:/PATH", _LABEL, "names no claim; use 1 to 63 small letters, digits and dashes")
_VARIABLE = _pair("=", "NAME=VALUE", r"[-._A-Za-z][-._A-Za-z0-9]*", "names no variable; use letters, digits and _ - .")
_SHM = "size of /dev/shm, part of the memory [1Gi; 16Gi with GPUs; at most half of --memory]"
_WRITABLE = "let the program write into the image's folders, not only /tmp, /dev/shm and claims"
_OPTIONS = (
    own("image", "IMAGE", "holds elaunch and the program (deploy/docker/Dockerfile); required", _IMAGE),
    own("name", "NAME", "name of the Job [the program's name]", _NAME),
    own("namespace", "NAME", "namespace of the Job [kubectl's]", _NAMESPACE),
    own("nodes", "MIN:MAX", "number of pods, or a range [1]", values.nodes, default=(1, 1)),
    own("gpus", "N", "GPUs per pod [0]", values.whole, default=0),
    own("gpu-resource", "NAME", "the cluster's name for GPUs [nvidia.com/gpu]", _RESOURCE, default="nvidia.com/gpu"),
    own("cpus", "N", "CPUs per pod: the request", _QUANTITY),
    own("memory", "SIZE", "memory per pod, like 64Gi: the request and the limit", _QUANTITY),
    own("shm", "SIZE", _SHM, _QUANTITY),
    own("grace", "SECONDS", "time for the workers to save before their pod ends [45]", values.whole, default=45),
    own("etcd", "A:2379,B:2379", "the store; without it the first pod serves one and must not be lost", endpoints),
    own("etcd-secret", "NAME", "a Secret with ca.crt, tls.crt and tls.key for the etcd", _SECRET),
    own("token-secret", "NAME", "a Secret with the token of the first pod's store [a new one]", _SECRET),
    own("claim", "NAME:/PATH", "a PersistentVolumeClaim and its mount path; may be repeated", _CLAIM, multiple=True),
    own("env", "NAME=VALUE", "an environment variable; may be repeated", _VARIABLE, multiple=True),
    own("writable-image", "", _WRITABLE),
    own("no-network-policy", "", "let pods of other jobs connect to this job's pods"),
    own("dry-run", "", "only print the manifests"),
)
COMMAND = JobCommand(
    "k8s",
    _main,
    _OPTIONS,
    usage=["--image IMAGE [options] [elaunch options] train.py args…"],
    about="Create a Job whose pods run `elaunch train.py args…`. The image holds the program.",
    ending="Needs kubectl, set up for the cluster (Kubernetes 1.29 or newer).",
    is_elsewhere=True,
)


def _default_shm(most: str, memory: str) -> str:
    """The size of /dev/shm: `most`, or half of the memory if that is less, since /dev/shm takes from the memory."""
    if not memory or 2 * _bytes(most) <= _bytes(memory):
        return most
    return f"{int(_bytes(memory)) >> 21}Mi"


def _bytes(quantity: str) -> float:
    unit = quantity.lstrip("0123456789.")
    number = float(quantity.removesuffix(unit))
    if unit == "m":
        return number / 1000
    power = "kmgtp".index(unit[0].lower()) + 1 if unit else 0
    return number * float(1024 if unit.endswith("i") else 1000) ** power


def _name(options: Options) -> str:
    """The Job's name: letters, digits and dashes, like a host name."""
    is_module = options.kind is ProgramKind.MODULE
    last = options.target.rpartition(".")[2] if is_module else PurePosixPath(options.target).stem
    made = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_NAME_MAX].strip("-")
    return made if made[:1].isalpha() else f"job-{made}".rstrip("-")


def as_yaml(made: Sequence[Object]) -> str:
    """The objects as YAML, for `kubectl create -f -`."""
    return "".join(f"---\n{yaml.safe_dump(each, sort_keys=False)}" for each in made)


def _create(asked: PodJob, token: str, where: Sequence[str]) -> None:
    """Create the Job, suspended, then the objects that it owns, then its pods. Existing objects are not changed."""
    made = job(asked)
    uid = _kubectl("create", as_yaml([suspended(made)]), *where, "--output=jsonpath={.metadata.uid}")
    try:
        _kubectl("create", as_yaml(owned(companions(asked, token), made, uid)), *where)
        _kubectl("patch", as_yaml([made]), *where, "--type=merge", '--patch={"spec":{"suspend":false}}')
    except (SiteError, KeyboardInterrupt):
        _kubectl("delete", as_yaml([made]), *where)
        raise


def _kubectl(verb: str, text: str, *options: str) -> str:
    """Run kubectl and return its output. Its errors go to the user's terminal."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError(
            "submit k8s finds no kubectl on the PATH; install it, or print the manifests with --dry-run and create"
            " them on a host that has it: kubectl create -f FILE"
        )
    done = subprocess.run(
        [kubectl, verb, *options, "--filename=-"], input=text, stdout=subprocess.PIPE, encoding="utf-8"
    )
    if done.returncode:
        raise SiteError(f"kubectl {verb} failed with exit code {done.returncode}; its message is above")
    return done.stdout


def _announcement(asked: PodJob, where: Sequence[str]) -> tuple[str, ...]:
    kubectl = " ".join(("kubectl", *where))
    selector = ",".join(f"{name}={value}" for name, value in labels(asked.instance).items())
    count = ":".join(str(number) for number in dict.fromkeys(asked.nodes))
    lines = [
        f"job {asked.name} is submitted, {count} {'pod' if count == '1' else 'pods'};"
        f" its output: {kubectl} logs --follow --prefix --selector {selector};"
        f" its end: {kubectl} delete job {asked.name}"
    ]
    if asked.has_token:
        lines.append(
            "its first pod serves the store: if that pod is lost, the job starts again; an etcd cluster outlives any"
            " pod (deploy/k8s/etcd, --etcd)"
        )
    return tuple(lines)


# The objects as data: those of deploy/k8s, made for one command line.


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
