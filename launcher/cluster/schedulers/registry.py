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

# A worker has it from its agent. A launcher that the worker starts knows by it that the scheduler's variables are those
# that the agent was started with. `srun`, `mpirun` and `sbatch` inside the worker set others.
_MARK = "ELAUNCH_SCHEDULER"


def mark_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that marks the schedulers' variables in `environ`; empty without any."""
    prefixes = tuple(prefix for each in SCHEDULERS.values() for prefix in each)
    found = sorted(item for item in environ.items() if item[0].startswith(prefixes))
    if not found:
        return {}
    # Imported here: a job outside of schedulers starts without it.
    import zlib

    return {_MARK: f"{zlib.crc32(repr(found).encode()):08x}"}


def detect(choice: str, environ: Mapping[str, str], hostname: str, read: Callable[[str], str]) -> Cluster | None:
    """The facts from the scheduler called `choice`. With "auto", from the first one that started this process, or None.

    A launcher inside a worker was started by the worker, not by the scheduler that started the worker's agent.

    `read` returns the text of a small file, like PBS's list of nodes. Raises UsageError for variables that make no
    sense, and if the chosen scheduler did not start this process.
    """
    mark = environ.get(_MARK)
    if choice == "none" or (choice == "auto" and mark and mark == mark_of(environ).get(_MARK)):
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
