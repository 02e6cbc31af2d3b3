"""`elaunch submit SCHEDULER …`: chooses the scheduler's module, and shows the help."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from elaunch.agent.environment import outside
from elaunch.launcher.errors import UsageError, nearest

HELP = """\
Usage: elaunch submit slurm [options] [elaunch options] train.py args…
       elaunch submit k8s [options] [elaunch options] train.py args…

Write the job for a cluster's scheduler and submit it; with --dry-run, only show it.
elaunch submit slurm --help and elaunch submit k8s --help list the options.
Start a script called submit with elaunch ./submit.
"""

# Each module has `main(argv, environ) -> exit code`, and raises UsageError and SiteError.
_MODULES = {"slurm": "slurm", "k8s": "kubernetes", "kubernetes": "kubernetes"}


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Submit a job. Returns the exit code. Raises UsageError and SiteError."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    module = _MODULES.get(argv[0])
    if module is None:
        near = nearest(argv[0], _MODULES)
        raise UsageError(
            f"submit {argv[0]}: elaunch does not know that scheduler; "
            + (f"did you mean {near}?" if near else "use elaunch submit slurm or elaunch submit k8s")
        )
    code: int = importlib.import_module(f"elaunch.launcher.submit.{module}").main(argv[1:], outside(environ))
    return code
