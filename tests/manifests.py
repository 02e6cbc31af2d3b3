"""The manifests of deploy/k8s as kubectl renders them, and what their NetworkPolicies allow."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.harness import REPOSITORY

K8S = REPOSITORY / "deploy" / "k8s"
Object = dict[str, Any]


def kubectl() -> str:
    """The real kubectl, which comes with the tests' Python packages."""
    here = Path(sys.executable).parent
    found = shutil.which("kubectl", path=f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    assert found, "no kubectl; pip install --editable '.[dev]'"
    return found


@functools.cache
def text(folder: str) -> str:
    """The text that `kubectl apply -k` would send for a folder of deploy/k8s."""
    done = subprocess.run([kubectl(), "kustomize", str(K8S / folder)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return done.stdout


def rendered(folder: str) -> list[Object]:
    return list(yaml.safe_load_all(text(folder)))


def the(kind: str, objects: list[Object]) -> Object:
    """The only object of that kind."""
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


ALL = range(65536)


def open_ports(policies: Sequence[Object], source: Object, target: Object) -> Sequence[int]:
    """The ports of a pod with the labels `target` that one with the labels `source` may connect to."""
    into = _of_direction(policies, "Ingress", "from", source, target)
    out_of = _of_direction(policies, "Egress", "to", target, source)
    if ALL in (into, out_of):
        return out_of if into is ALL else into
    return sorted(set(into) & set(out_of))


def _of_direction(policies: Sequence[Object], direction: str, peers: str, other: Object, own: Object) -> Sequence[int]:
    """The ports that the policies of the pod `own` allow from, or to, the pod `other`. All ports without a policy."""
    specs = [each["spec"] for each in policies]
    ours = [spec for spec in specs if direction in spec["policyTypes"] and _selects(spec["podSelector"], own)]
    if not ours:
        return ALL
    found: list[int] = []
    for rule in (rule for spec in ours for rule in spec.get(direction.lower(), [])):
        if peers in rule and not any(_is_of(peer, other) for peer in rule[peers]):
            continue
        if "ports" not in rule:
            return ALL
        found += [each["port"] for each in rule["ports"] if each.get("protocol", "TCP") == "TCP"]
    return found


def _is_of(peer: Object, labels: Object) -> bool:
    """Whether the selector fits a pod of this namespace."""
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    return "namespaceSelector" not in peer and _selects(peer["podSelector"], labels)


def _selects(selector: Object, labels: Object) -> bool:
    assert set(selector) <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
