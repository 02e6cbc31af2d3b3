"""Which torch, Python and elaunch this node has, without importing torch."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from elaunch import __version__
from elaunch.rendezvous.job_spec import Program

_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]{1,80})['\"]", re.MULTILINE)


def software(program: Program) -> str:
    """The versions in words: elaunch's own alone if the workers run another interpreter, or one that is not known."""
    own = f"elaunch {__version__}"
    if program.interpreter != sys.executable:
        return own
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    torch = _torch()
    return f"torch {torch}, Python {python}, {own}" if torch else f"Python {python}, {own}"


def _torch() -> str:
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        try:
            # pip's record of it is not read: its folder would have to be searched for.
            found = _VERSION.search(Path(folder, "version.py").read_text())
        except (OSError, ValueError):
            continue
        if found:
            return found[1]
    return ""
