"""`elaunch submit k8s`: a job for Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaunch.launcher.errors import UsageError


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code. Raises UsageError and SiteError."""
    raise UsageError("submit k8s is not there yet; deploy/k8s has the manifests")
