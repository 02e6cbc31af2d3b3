"""The manifests of deploy/k8s as kubectl renders them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
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
