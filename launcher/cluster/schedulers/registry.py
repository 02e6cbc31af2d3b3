"""Finds the scheduler that started this process, and its facts about the job. Pure: all inputs are arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from elaunch.launcher.errors import UsageError

if TYPE_CHECKING:
    from elaunch.launcher.cluster.cluster import Cluster, Detect

# What the names of each scheduler's variables begin with. A scheduler without one of them has not started this process,
# and its module, which has the scheduler's name, is not imported.
# The innermost scheduler comes first: mpirun and Flux run inside of an allocation, and Slurm's nodes may be pods.
SCHEDULERS: Mapping[str, tuple[str, ...]] = {
    "mpi": ("OMPI_COMM_WORLD_", "PMI_", "PMIX_"),
    "flux": ("FLUX_",),
    "slurm": ("SLURM_",),
    "lsf": ("LSB_",),
    "pbs": ("PBS_",),
    "kubernetes": ("LWS_", "JOB_COMPLETION_INDEX", "KUBERNETES_"),
}


def detect(choice: str, environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts from the scheduler called `choice`. With "auto", from the first one that started this process, or None.

    `read` returns the text of a small file, like PBS's list of nodes. Raises UsageError for variables that make no
    sense, and if the chosen scheduler did not start this process.
    """
    if choice == "none":
        return None
    for name, prefixes in SCHEDULERS.items():
        if choice not in ("auto", name) or not any(variable.startswith(prefixes) for variable in environ):
            continue
        try:
            found = _ask(name, environ, hostname, read)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"{error}; correct what {name} is said to have set, or take no notice of it: --scheduler none"
            ) from None
        if found is not None:
            return found
    if choice != "auto":
        raise UsageError(f"--scheduler {choice} finds none of its variables; start elaunch by it, or leave that out")
    return None


def _ask(name: str, environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    from elaunch.launcher.cluster.cluster import check

    ask: Detect = import_module(f"{__package__}.{name}").detect
    found = ask(environ, hostname, read)
    if found is not None:
        check(found)
    return found
