"""The process that runs a function's job: the command `elaunch`, which reports its outcome to its caller.

It has a process of its own because the agent handles signals, forks, and exits when the job does.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from elaunch.interrupts import end_at_ctrl_c

    # The caller raises KeyboardInterrupt.
    end_at_ctrl_c()
    if sys.path and not getattr(sys.flags, "safe_path", False):
        # Python put the current folder first; a json.py of the user's there must not be imported.
        del sys.path[0]

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NoReturn

from elaunch.agent.config import AgentConfig
from elaunch.agent.linux import die_with_parent
from elaunch.agent.run import AgentRun
from elaunch.launcher.cli import as_command, run
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.functions import worker
from elaunch.launcher.host import environ_at_start
from elaunch.launcher.options.options import parse
from elaunch.launcher.report import record, report
from elaunch.rendezvous.types import Outcome, ProgramKind


def main(parent: str, name: str, files: str, *argv: str) -> NoReturn:
    """Run the job of `argv`. `files` are descriptors that `parent` opened: see `launch`. `name` is the entrypoint's."""
    # SIGTERM, so that workers can save. The agent's own death ends the workers in any case.
    die_with_parent(int(parent), signal.SIGTERM)
    for fd in files.split(","):
        os.set_inheritable(int(fd), False)
    as_command(partial(_run, argv, files, name))


def _run(argv: tuple[str, ...], files: str, name: str) -> int:
    response = int(files.partition(",")[0])
    # The caller reports a failure that it does not handle to a launcher above it.
    environ = {key: value for key, value in environ_at_start(os.environ).items() if key != "TORCHELASTIC_ERROR_FILE"}
    if worker.__name__ in argv:
        environ[worker.VARIABLE] = f"/proc/{os.getpid()}/fd,{files}"
    try:
        # The configuration is complete: the command's variables (PET_…) do not change it, as in torch.
        return run(parse(argv, {}), environ, partial(_report, response, name))
    except (UsageError, SiteError) as error:
        code = 2 if isinstance(error, UsageError) else 3
        _write(response, {"outcome": type(error).__name__, "text": str(error), "exit_code": code})
        return code


def _report(response: int, name: str, outcome: Outcome, config: AgentConfig, agent: AgentRun) -> None:
    # The report names the function: the program's real module is elaunch's own.
    program = replace(config.spec.program, kind=ProgramKind.SCRIPT, target=name)
    spec = replace(config.spec, program=program)
    text = report(outcome, spec, agent.run_dir.logs, agent.run_dir.is_incomplete)
    fields = record(outcome, agent.run_dir.logs)
    if outcome.exit_code == 0:
        # Any other text is in the exception that the caller raises.
        agent.pump.write_report(text, fields)
    _write(response, {**fields, "text": text})


def _write(response: int, fields: Mapping[str, object]) -> None:
    with open(response, "w", closefd=False) as file:
        json.dump(fields, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
