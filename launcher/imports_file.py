"""Where it is remembered what a program imports: one file for each program and user, in the user's cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from elaunch.digests import sha256
from elaunch.launcher.options.options import Options
from elaunch.launcher.resources import HostResources
from elaunch.rendezvous.job_spec import ProgramKind
from elaunch.user_cache import cache_folder

# The program of all functions' jobs. Its arguments are the function's name and the worker's local rank.
FUNCTIONS_PROGRAM = "elaunch.launcher.functions.worker"


def imports_file(options: Options, environ: Mapping[str, str], host: HostResources) -> Path | None:
    """The file of this command, which need not exist. None for a user without a home.

    The program's arguments do not matter: most of them are a run's name or its settings. Of a function's job the
    program is elaunch's own module, so the function's name matters, which is the first argument.
    """
    folder = cache_folder(environ, "imports")
    if folder is None:
        return None
    try:
        place = os.getcwd() if options.kind is ProgramKind.MODULE else os.path.realpath(options.target)  # noqa: PTH109
    except OSError:
        return None
    module = options.target if options.kind is ProgramKind.MODULE else ""
    function = options.args[:1] if module == FUNCTIONS_PROGRAM else ()
    command = [host.python, host.python_options, options.kind.value, place, module, function, options.preload]
    return folder / sha256(json.dumps(command).encode()).hexdigest()[:32]
