"""Finds the scheduler that started this process, and its facts about the job. Pure: all inputs are arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.launcher.cluster.cluster import Cluster, Detect, check
from elaunch.launcher.cluster.schedulers import flux, kubernetes, lsf, mpi, pbs, slurm
from elaunch.launcher.errors import UsageError

# The innermost scheduler comes first: mpirun and Flux run inside of an allocation, and Slurm's nodes may be pods.
SCHEDULERS: Mapping[str, Detect] = {
    "mpi": mpi.detect,
    "flux": flux.detect,
    "slurm": slurm.detect,
    "lsf": lsf.detect,
    "pbs": pbs.detect,
    "kubernetes": kubernetes.detect,
}


def detect(choice: str, environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts from the scheduler called `choice`. With "auto", from the first one that started this process, or None.

    `read` returns the text of a small file, like PBS's list of nodes. Raises UsageError for variables that make no
    sense, and if the chosen scheduler did not start this process.
    """
    if choice == "none":
        return None
    for name, ask in SCHEDULERS.items():
        if choice not in ("auto", name):
            continue
        try:
            found = ask(environ, hostname, read)
            if found is not None:
                check(found)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"{error}; correct what {name} is said to have set, or take no notice of it: --scheduler none"
            ) from None
        if found is not None:
            return found
    if choice != "auto":
        raise UsageError(f"--scheduler {choice} finds none of its variables; start elaunch by it, or leave that out")
    return None
