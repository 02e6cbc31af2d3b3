"""elaunch with longer limits than its own, for tests in which no wait for a CPU may decide."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.harness import Job


def command(limits: Mapping[str, float]) -> tuple[str, ...]:
    """elaunch with these limits (s), by their full names. A name that does not exist ends it."""
    settings = [f"import {name.rpartition('.')[0]}\n{name}\n{name} = {limit_s}" for name, limit_s in limits.items()]
    return (sys.executable, "-c", "\n".join([*settings, "from elaunch.launcher.cli import main", "main()"]))


def patient(limits: Mapping[str, float]) -> type[Job]:
    """A job whose agents have these limits."""
    return type("Patient", (Job,), {"command": command(limits)})


def finished(limits: Mapping[str, float], folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Job:
    """Run a job with these limits to its end. Its temporary files go to `folder`."""
    with patient(limits)(folder, *args, env={"TMPDIR": str(folder), **(env or {})}) as job:
        job.wait()
    return job
