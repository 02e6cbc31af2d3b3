"""Finds the scheduler that started this process, and its facts about the job. Pure: all inputs are arguments."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from elaunch.launcher.errors import UsageError
from elaunch.launcher.schedulers import batch, kubernetes, mpi, slurm
from elaunch.launcher.schedulers.facts import Cluster, Detect, check

# What the names of each scheduler's variables begin with, and what reads them.
# The innermost scheduler comes first: mpirun and Flux run inside of an allocation, and Slurm's nodes may be pods.
SCHEDULERS: Mapping[str, tuple[tuple[str, ...], Detect]] = {
    "mpi": (("OMPI_COMM_WORLD_", "PMI_", "PMIX_"), mpi.detect),
    "flux": (("FLUX_",), batch.detect_flux),
    "slurm": (("SLURM_",), slurm.detect),
    "lsf": (("LSB_",), batch.detect_lsf),
    "pbs": (("PBS_",), batch.detect_pbs),
    "kubernetes": (("LWS_", "JOB_COMPLETION_INDEX", "KUBERNETES_"), kubernetes.detect),
}

# A worker has it from its agent. A launcher that the worker starts knows by it that the scheduler's variables are those
# that the agent was started with. `srun`, `mpirun` and `sbatch` inside the worker set others.
_MARK = "ELAUNCH_SCHEDULER"


def mark_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that marks the schedulers' variables in `environ`; empty without any."""
    prefixes = tuple(prefix for each, _ in SCHEDULERS.values() for prefix in each)
    found = sorted(item for item in environ.items() if item[0].startswith(prefixes))
    return {_MARK: f"{zlib.crc32(repr(found).encode()):08x}"} if found else {}


def detect(choice: str, environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts from the scheduler called `choice`. With "auto", from the first one that started this process, or None.

    A launcher inside a worker was started by the worker, not by the scheduler that started the worker's agent.

    `read` returns the text of a small file, like PBS's list of nodes. Raises UsageError for variables that make no
    sense, and if the chosen scheduler did not start this process.
    """
    mark = environ.get(_MARK)
    if choice == "none" or (choice == "auto" and mark and mark == mark_of(environ).get(_MARK)):
        return None
    for name, (prefixes, facts_of) in SCHEDULERS.items():
        if choice not in ("auto", name) or not any(variable.startswith(prefixes) for variable in environ):
            continue
        try:
            if found := facts_of(environ, hostname, read):
                check(found)
                return found
        except (ValueError, OSError) as error:
            raise UsageError(
                f"{error}; correct what {name} is said to have set, or take no notice of it: --scheduler none"
            ) from None
    if choice != "auto":
        raise UsageError(f"--scheduler {choice} finds none of its variables; start elaunch by it, or leave that out")
    return None
