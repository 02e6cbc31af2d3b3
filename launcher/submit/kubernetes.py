"""`elaunch submit k8s`: makes an indexed Job of elaunch nodes, and the objects that it needs."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options import argv as command_line
from elaunch.launcher.options import rdzv_conf, values
from elaunch.launcher.options.endpoints import endpoints
from elaunch.launcher.options.job_file import JobFile
from elaunch.launcher.options.options import HelpRequested, parse
from elaunch.launcher.submit.flags import Flag, Submission, help_text, take
from elaunch.launcher.submit.manifests import Object, PodJob, companions, job, labels, owned, suspended
from elaunch.records import replace
from elaunch.rendezvous.secret import new_token

FLAGS = (
    Flag("image", "IMAGE", "holds elaunch and the program (deploy/docker/Dockerfile); required"),
    Flag("name", "NAME", "name of the Job [the program's name]"),
    Flag("namespace", "NAME", "namespace of the Job [kubectl's]"),
    Flag("nodes", "MIN:MAX", "number of pods, or a range [1]"),
    Flag("gpus", "N", "GPUs per pod [0]"),
    Flag("gpu-resource", "NAME", "the cluster's name for GPUs [nvidia.com/gpu]"),
    Flag("cpus", "N", "CPUs per pod: the request"),
    Flag("memory", "SIZE", "memory per pod, like 64Gi: the request and the limit"),
    Flag("shm", "SIZE", "size of /dev/shm, part of the memory [1Gi; 16Gi with GPUs; at most half of --memory]"),
    Flag("grace", "SECONDS", "time for the workers to save before their pod ends [45]"),
    Flag("etcd", "A:2379,B:2379", "the store; without it the first pod serves one and must not be lost"),
    Flag("etcd-secret", "NAME", "a Secret with ca.crt, tls.crt and tls.key for the etcd"),
    Flag("token-secret", "NAME", "a Secret with the token of the first pod's store [a new one]"),
    Flag("claim", "NAME:/PATH", "a PersistentVolumeClaim and its mount path; may be repeated", many=True),
    Flag("env", "NAME=VALUE", "an environment variable; may be repeated", many=True),
    Flag("writable-image", "", "let the program write into the image's folders, not only /tmp, /dev/shm and claims"),
    Flag("no-network-policy", "", "let pods of other jobs connect to this job's pods"),
    Flag("dry-run", "", "only print the manifests"),
    Flag("help", "", "show this text"),
)
_USAGE = """\
Usage: elaunch submit k8s --image IMAGE [options] [elaunch options] train.py args…

Create a Job whose pods run `elaunch train.py args…`. The image holds the program.
"""
_END = "Needs kubectl, set up for the cluster (Kubernetes 1.29 or newer).\n"

# A host name has at most 63 characters. The rest is for the submission's suffix: `name-1f2e3d`.
_NAME_MAX = 52

# Options of elaunch whose values the pods get in another way.
_NOT_HERE = {
    "nnodes": "follows from the number of pods; use --nodes instead",
    "node-rank": "is the pod's index; leave it out",
    "standalone": "is for a job on one node; use --nodes 1",
    "stop-grace": "follows from the pods' grace period; use --grace instead",
}


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Submit the job, or print its manifests. Returns the exit code. Raises UsageError and SiteError."""
    submission = take(["--help" if word == "-h" else word for word in argv[:1]] + list(argv[1:]), FLAGS)
    if "help" in submission.given:
        print(help_text(_USAGE, FLAGS, _END), end="")
        return 0
    asked = understand(submission, secrets.token_hex(3))
    token = ""
    if asked.has_token and "token-secret" not in submission.given:
        token = environ.get("ELAUNCH_TOKEN", "").strip() or new_token()
    namespace = submission.last("namespace")
    if "dry-run" in submission.given:
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


def understand(submission: Submission, suffix: str = "") -> PodJob:
    """The job that is asked for. `suffix` is unique to this submission. Raises UsageError, also if elaunch would."""
    if not submission.last("image"):
        raise UsageError("--image is missing: the image holds elaunch and the program; see deploy/docker/Dockerfile")
    _check_text(submission)
    words = command_line.normalise(submission.command)
    nodes = _checked(submission, "nodes", values.nodes, "1")
    variables = tuple(_pair(text, "=", "--env", "NAME=VALUE") for text in submission.given.get("env", ()))
    _check_command(submission.command, words, nodes, dict(variables))
    gpus = str(_checked(submission, "gpus", values.whole, "0"))
    memory, shm = _quantity(submission, "memory"), _quantity(submission, "shm")
    if memory and shm and _bytes(shm) > _bytes(memory):
        raise UsageError(
            f"--shm {shm} is more than --memory {memory}, and /dev/shm is part of the memory; ask for more memory, or"
            " for a smaller /dev/shm"
        )
    shm = shm or _default_shm("1Gi" if gpus == "0" else "16Gi", memory)
    name = _name(submission, words)
    instance = f"{name}-{suffix}" if suffix else name
    return PodJob(
        name=name,
        instance=instance,
        image=submission.last("image"),
        command=submission.command,
        nodes=nodes,
        gpus="" if gpus == "0" else gpus,
        gpu_resource=submission.last("gpu-resource", "nvidia.com/gpu"),
        cpus=_quantity(submission, "cpus"),
        memory=memory,
        shm=shm,
        stop_grace_s=_checked(submission, "grace", values.whole, "45"),
        etcd=_etcd(submission),
        etcd_secret=submission.last("etcd-secret"),
        token_secret=submission.last("token-secret", f"{instance}-token"),
        claims=tuple(_pair(text, ":", "--claim", "NAME:/PATH") for text in submission.given.get("claim", ())),
        variables=variables,
        is_closed="no-network-policy" not in submission.given,
        is_writable="writable-image" in submission.given,
    )


# The API server checks these names in the same way (RFC 1123). An image's name is only checked to be one word.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@+-]*", re.ASCII)
_VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
_NAMES = (
    ("image", _IMAGE, "an image, as registry/name:tag"),
    ("namespace", _LABEL, "a namespace: small letters, digits and dashes"),
    ("gpu-resource", _QUALIFIED, "a resource, as nvidia.com/gpu"),
    ("etcd-secret", _SUBDOMAIN, "a Secret: small letters, digits, dashes and dots"),
    ("token-secret", _SUBDOMAIN, "a Secret: small letters, digits, dashes and dots"),
)


def _check_text(submission: Submission) -> None:
    """Raises UsageError for text that a manifest cannot hold, or that would mean something else there."""
    for word in (*submission.command, *(value for several in submission.given.values() for value in several)):
        if re.search(r"[\ud800-\udfff]", word):
            raise UsageError(f"{word!r} is not UTF-8, and a manifest must be; put it into a file of the image")
    for flag, pattern, what in _NAMES:
        if (given := submission.last(flag)) and not pattern.fullmatch(given):
            raise UsageError(f"--{flag} {given!r} is not the name of {what}")
    for text in submission.given.get("env", ()):
        name = text.partition("=")[0]
        if name and not _VARIABLE.fullmatch(name):
            raise UsageError(f"--env {name!r} is not the name of a variable; use letters, digits and _ - .")
    for text in submission.given.get("claim", ()):
        name = text.partition(":")[0]
        # The volume has the same name, and a volume's name must not have dots.
        if name and not _LABEL.fullmatch(name):
            raise UsageError(
                f"--claim {name!r} is not the name of a claim; use 1 to 63 small letters, digits and dashes"
            )


def _check_command(
    command: Sequence[str], words: command_line.CommandLine, nodes: tuple[int, int], variables: Mapping[str, str]
) -> None:
    """Raises UsageError for a command with which every pod would end with exit code 2 after it is scheduled."""
    for name, why in _NOT_HERE.items():
        variable = f"PET_{name.upper().replace('-', '_')}"
        if variable in variables:
            raise UsageError(f"--env {variable}={variables[variable]}: it {why}")
        if words.last(name):
            raise UsageError(f"--{name} {why}")
    # A job file is in the image, like the program. It is not read here.
    checked = parse(command, {"PET_NNODES": f"{nodes[0]}:{nodes[1]}", **variables}, lambda _: JobFile({}))
    if isinstance(checked, HelpRequested):
        raise UsageError("submit k8s takes a program: elaunch submit k8s --image IMAGE train.py")
    rdzv_conf.understand(checked.rdzv_conf)
    if checked.target == "-":
        raise UsageError("- means a program on stdin, and pods have no stdin; name a file of the image")


def _etcd(submission: Submission) -> str:
    """The endpoints for the pods, with https:// if there is a Secret with certificates. Raises UsageError."""
    text, secret = submission.last("etcd"), submission.last("etcd-secret")
    found = _checked(submission, "etcd", endpoints, "")
    if not secret:
        return text
    if not found:
        raise UsageError(f"--etcd-secret {secret} is for an etcd; give its address with --etcd HOST:PORT")
    if any(address.scheme == "http" for address in found):
        raise UsageError(f"--etcd {text} means no TLS, and --etcd-secret {secret} is for TLS; use https://")
    return ",".join(str(replace(address, scheme="https")) for address in found)


def _checked(submission: Submission, name: str, convert: values.Convert, default: str) -> Any:
    raw = submission.last(name, default)
    try:
        return convert(raw)
    except ValueError as error:
        raise UsageError(f"--{name} {raw} {error}") from None


def _quantity(submission: Submission, name: str) -> str:
    text = submission.last(name)
    if text and not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTP]i?|Ki)?", text):
        raise UsageError(f"--{name} {text} is not a quantity of Kubernetes; give one like 8, 500m or 64Gi")
    return text


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


def _name(submission: Submission, words: command_line.CommandLine) -> str:
    """The Job's name: letters, digits and dashes, like a host name."""
    given = submission.last("name")
    if given:
        if len(given) > _NAME_MAX or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", given):
            raise UsageError(
                f"--name {given} is not a host name; use up to {_NAME_MAX} small letters, digits and dashes,"
                " with a letter first"
            )
        return given
    program = words.program[0]
    last = program.rpartition(".")[2] if words.last("module") else PurePosixPath(program).stem
    made = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_NAME_MAX].strip("-")
    return made if made[:1].isalpha() else f"job-{made}".rstrip("-")


def _pair(text: str, separator: str, flag: str, metavar: str) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not (name and found) or (separator == ":" and not value.startswith("/")):
        raise UsageError(f"{flag} {text} is not {metavar}")
    return name, value


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
