"""`elaunch submit k8s`: creates an indexed Job of elaunch nodes, and the objects that it needs."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import click
import jinja2
import yaml

from elaunch.agent.environment import outside
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options import values
from elaunch.launcher.options.command_line import Option
from elaunch.launcher.options.options import JobCommand, JobFile, Options, argv_of, submitted
from elaunch.launcher.options.values import endpoints
from elaunch.rendezvous.secret import new_token
from elaunch.rendezvous.types import ProgramKind

Object = dict[str, Any]

# A host name has at most 63 characters. The rest is for the submission's suffix: `name-1f2e3d`.
_NAME_MAX = 52

# Options of elaunch that cannot be given here, and why.
_NOT_HERE = {
    "nnodes": "follows from the number of pods; use --nodes instead",
    "node_rank": "is the pod's index; leave it out",
    "standalone": "is for a job on one node; use --nodes 1",
    "stop_grace": "follows from the pods' grace period; use --grace instead",
}


@dataclass(frozen=True)
class PodJob:
    """The job to run. `given` are the values of the command line.

    `instance` distinguishes this submission from an earlier one of the same `name`, whose pods may still run. It is the
    pods' label, and the name of the objects beside the Job. `etcd` holds endpoints. If it is empty, the first of
    several pods serves the store, and its clients need the token in the Secret `token_secret`. A pod that exits with
    one of `final_codes` ends the Job.
    """

    name: str
    instance: str
    command: tuple[str, ...]
    etcd: str
    token_secret: str
    final_codes: list[int]
    given: Mapping[str, Any]


def _main(ctx: click.Context) -> int:
    """Submit the job, or print its manifests. Returns the exit code. Raises UsageError and SiteError."""
    job = job_of(ctx, secrets.token_hex(3))
    token = ""
    if job.token_secret and not ctx.params["token_secret"]:
        token = outside(ctx.obj.environ).get("ELAUNCH_TOKEN", "").strip() or new_token()
    if ctx.params["dry_run"]:
        sys.stdout.write(as_yaml(objects(job, token)))
        return 0
    namespace = ctx.params["namespace"]
    where = ["--namespace", namespace] if namespace else []
    _create(job, token, where)
    kubectl = " ".join(("kubectl", *where))
    selector = f"app.kubernetes.io/name=elaunch,app.kubernetes.io/instance={job.instance}"
    print(
        f"elaunch: job {job.name} is submitted; its output: {kubectl} logs --follow --prefix --selector {selector};"
        f" to delete it: {kubectl} delete job {job.name}",
        file=sys.stderr,
    )
    return 0


def job_of(ctx: click.Context, suffix: str = "") -> PodJob:
    """The job to submit. `suffix` is unique to this submission. Raises UsageError, also for what elaunch refuses."""
    given = ctx.params
    if not given["image"]:
        raise UsageError("--image is missing: the image holds elaunch and the program; see deploy/docker/Dockerfile")
    nodes, variables = given["nodes"], dict(given["env"])
    # With these every pod would end with exit code 2 after it is scheduled.
    for name, why in _NOT_HERE.items():
        variable = f"PET_{name.upper()}"
        if variable in variables:
            raise UsageError(f"--env {variable}={variables[variable]}: it {why}")
        if name in ctx.obj.given:
            raise UsageError(f"--{name.replace('_', '-')} {why}")
    # A job file is in the image, like the program. It is not read here.
    options = submitted(ctx, {"PET_NNODES": f"{nodes[0]}:{nodes[1]}", **variables}, lambda _: JobFile({}))
    command = argv_of(options.typed, options.program)
    for word in (*command, *(value for _, value in (*given["env"], *given["claim"]))):
        # Python keeps bytes that are not UTF-8 as lone surrogates.
        if re.search(r"[\ud800-\udfff]", word):
            raise UsageError(f"{word!r} is not UTF-8, and a manifest must be; put it into a file of the image")
    name = given["name"] or _name(options)
    instance = f"{name}-{suffix}" if suffix else name
    found, secret = given["etcd"] or (), given["etcd_secret"]
    if secret and (not found or any(address.scheme == "http" for address in found)):
        raise UsageError(f"--etcd-secret {secret} is for an etcd with TLS; give its address: --etcd https://HOST:PORT")
    # The Secret has the certificates.
    etcd = ",".join(str(replace(address, scheme="https") if secret else address) for address in found)
    has_token = nodes[1] > 1 and not etcd
    token_secret = (given["token_secret"] or f"{instance}-token") if has_token else ""
    final_codes = sorted({1, 2, 130, *options.no_restart_codes})
    return PodJob(name, instance, tuple(command), etcd, token_secret, final_codes, given)


def _pair(separator: str, metavar: str, raw: values.Raw) -> tuple[str, str]:
    """A name and a value."""
    name, found, value = str(raw).partition(separator)
    if not (name and found):
        raise ValueError(f"is not {metavar}")
    return name, value


_CLAIM, _VARIABLE = partial(_pair, ":", "NAME:/PATH"), partial(_pair, "=", "NAME=VALUE")
# The API server checks names and quantities.
_OPTIONS = (
    Option("image", "IMAGE", "holds elaunch and the program (deploy/docker/Dockerfile); required"),
    Option("name", "NAME", "name of the Job [the program's name]"),
    Option("namespace", "NAME", "namespace of the Job [kubectl's]"),
    Option("nodes", "MIN:MAX", "number of pods, or a range [1]", values.nodes, default=(1, 1)),
    Option("gpus", "N", "GPUs per pod [0]", values.whole, default=0),
    Option("gpu-resource", "NAME", "the cluster's name for GPUs [nvidia.com/gpu]", default="nvidia.com/gpu"),
    Option("cpus", "N", "CPUs per pod: the request"),
    Option("memory", "SIZE", "memory per pod, like 64Gi: the request and the limit"),
    Option("shm", "SIZE", "size of /dev/shm, part of the memory [1Gi; 16Gi with GPUs]"),
    Option("grace", "SECONDS", "time for the workers to save before their pod ends [45]", values.whole, default=45),
    Option("etcd", "A:2379,B:2379", "the store; without it the first pod serves one and must not be lost", endpoints),
    Option("etcd-secret", "NAME", "a Secret with ca.crt, tls.crt and tls.key for the etcd"),
    Option("token-secret", "NAME", "a Secret with the token of the first pod's store [a new one]"),
    Option("claim", "NAME:/PATH", "a PersistentVolumeClaim and its mount path; may be repeated", _CLAIM, multiple=True),
    Option("env", "NAME=VALUE", "an environment variable; may be repeated", _VARIABLE, multiple=True),
    Option("writable-image", "", "let the program write into the image's folders, not only /tmp, /dev/shm and claims"),
    Option("no-network-policy", "", "let pods of other jobs connect to this job's pods"),
    Option("dry-run", "", "only print the manifests"),
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


def _name(options: Options) -> str:
    """The Job's name: letters, digits and dashes, like a host name."""
    is_module = options.kind is ProgramKind.MODULE
    last = options.target.rpartition(".")[2] if is_module else PurePosixPath(options.target).stem
    made = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_NAME_MAX].strip("-")
    return made if made[:1].isalpha() else f"job-{made}".rstrip("-")


def as_yaml(made: Sequence[Object]) -> str:
    """The objects as YAML, for `kubectl create -f -`."""
    return "".join(f"---\n{yaml.safe_dump(each, sort_keys=False)}" for each in made)


def _create(job: PodJob, token: str, where: Sequence[str]) -> None:
    """Create the Job suspended, then the objects that it owns; then resume it. Existing objects are not changed."""
    *companions, made = objects(job, token)
    suspended = {**made, "spec": {"suspend": True, **made["spec"]}}
    uid = _kubectl("create", [suspended], *where, "--output=jsonpath={.metadata.uid}")
    # Kubernetes deletes the objects together with their owner.
    owner = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": job.name, "uid": uid}
    owned = [{**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}} for each in companions]
    try:
        _kubectl("create", owned, *where)
        _kubectl("patch", [made], *where, "--type=merge", '--patch={"spec":{"suspend":false}}')
    except (SiteError, KeyboardInterrupt):
        _kubectl("delete", [made], *where)
        raise


def _kubectl(verb: str, made: Sequence[Object], *options: str) -> str:
    """Run kubectl on these objects and return its output. Its errors go to the user's terminal."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError(
            "submit k8s finds no kubectl on the PATH; install it, or print the manifests with --dry-run and create"
            " them on a host that has it: kubectl create -f FILE"
        )
    command = [kubectl, verb, *options, "--filename=-"]
    done = subprocess.run(command, input=as_yaml(made), stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        raise SiteError(f"kubectl {verb} failed with exit code {done.returncode}; its message is above")
    return done.stdout


def objects(job: PodJob, token: str = "") -> list[Object]:
    """The Job, after the objects beside it: a Service, a NetworkPolicy, a PodDisruptionBudget, a Secret for `token`."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["text"] = _scalar
    # Kubernetes would replace $(NAME) by a variable's value.
    environment.filters["literal"] = lambda word: _scalar(word.replace("$", "$$"))
    template = environment.from_string(Path(__file__).with_name("pods.yaml").read_text())
    return list(yaml.safe_load_all(template.render(job=job, given=job.given, token=token)))


def _scalar(word: str) -> str:
    """Any text as a YAML scalar on one line."""
    return yaml.safe_dump(word, default_style='"', width=sys.maxsize).strip()
