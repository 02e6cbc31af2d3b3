"""A fork server that is the workers' own interpreter, paused just before it would run the program.

So Python itself makes what a worker is (command line, options, flags, `sys.path`) and what its program sees when it
starts (`__main__`, its stack, tracebacks, exit codes).
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Collection
from typing import Any

from elaunch.agent.forkserver.boot import BOOT_VARIABLE, HOOK_DIR, Boot
from elaunch.agent.forkserver.server import main


def pause(loaded_at_start: Collection[str]) -> None:
    """Be the fork server. Returns only in a forked worker, where nothing is left of the pause."""
    boot = Boot.read(int(os.environ.pop(BOOT_VARIABLE)))
    sys.path.remove(HOOK_DIR)
    sys.path_importer_cache.pop(HOOK_DIR, None)
    del sys.modules["sitecustomize"]
    if boot.pythonpath is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = boot.pythonpath
    main(boot, loaded_at_start, _customise)


def _customise() -> None:
    """Run the user's own sitecustomize and usercustomize, as Python would have here (Lib/site.py, main)."""
    python: Any = site
    python.execsitecustomize()
    if site.ENABLE_USER_SITE:
        python.execusercustomize()
