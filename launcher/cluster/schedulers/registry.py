"""Which scheduler started this process, and what it says: pure, all that is read comes in as an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.launcher.cluster.cluster import Cluster, Detect, check
from elaunch.launcher.cluster.schedulers import flux, kubernetes, lsf, mpi, pbs, slurm
from elaunch.launcher.errors import UsageError

# The innermost first: mpirun runs inside of an allocation, Flux too, and a Slurm's nodes may be pods.
SCHEDULERS: Mapping[str, Detect] = {
    "mpi": mpi.detect,
    "flux": flux.detect,
    "slurm": slurm.detect,
    "lsf": lsf.detect,
    "pbs": pbs.detect,
    "kubernetes": kubernetes.detect,
}


def detect(choice: str, environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """What the scheduler of that name says, or the first that says anything where `choice` is auto.

    `read` gives the text of a small file, as PBS names one. Raises UsageError for variables that make no sense, and
    where the chosen scheduler did not start this process.
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
