"""Prepares a worker that is a fresh interpreter, just before it runs the program (see hook/sitecustomize.py).

The program then finds what it would find without elaunch, but for a few modules of the standard library that are
imported already, and for what docs/fidelity.md lists. So this module imports as little as it can.
"""

from __future__ import annotations

import os
import site
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

_VARIABLE = "ELAUNCH_BOOT"


def prepare(loaded_at_start: Collection[str]) -> None:
    """Undo what brought the interpreter here, have it tell its agent how the program ends, and customise it."""
    _, crash_fd, pythonpath, reports = os.environ.pop(_VARIABLE).split()
    hook_dir = sys.path.pop(0)
    sys.path_importer_cache.pop(hook_dir, None)
    del sys.modules["sitecustomize"]
    rest = os.environ["PYTHONPATH"].removeprefix(hook_dir).removeprefix(os.pathsep)
    if pythonpath == "unset":
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = rest

    from elaunch.agent.forkserver import collectives, crash_stack

    try:
        crash_stack.enable(int(crash_fd))
        if reports == "1":
            from elaunch.agent.forkserver import exit_report

            exit_report.promise(int(crash_fd))
        collectives.prepare(None)
    except Exception:
        # The program runs all the same; only the report of its end has less in it.
        pass
    for name in [name for name in sys.modules if name not in loaded_at_start and name.startswith("elaunch")]:
        del sys.modules[name]
    python: Any = site
    python.execsitecustomize()
