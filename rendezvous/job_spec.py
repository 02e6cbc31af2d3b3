"""The job as the command line describes it: the program, and what its nodes must agree on."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

from elaunch.rendezvous.format import plain
from elaunch.rendezvous.types import Terms

# torchrun's name for a job without --run-id. All nodes of the job must use the same name.
UNNAMED = "none"


def job_name(run_id: str) -> str:
    """What sentences call the job."""
    return "unnamed job" if run_id == UNNAMED else f"job {run_id}"


def called(run_id: str, pid: int) -> str:
    """What a user of its host types for a job, whose elaunch is `pid`."""
    return str(pid) if run_id == UNNAMED else shlex.quote(plain(run_id))


class ProgramKind(Enum):
    """How the worker's program is named on the command line."""

    SCRIPT = "script"  # python -u target args…
    MODULE = "module"  # python -u -m target args…
    COMMAND = "command"  # target args…, no Python (--no-python)


@dataclass(frozen=True)
class Program:
    """What every worker runs.

    `target` is a path, a module name or a command, as typed. `interpreter` runs scripts and modules: the interpreter of
    this process, unless `PYTHON_EXEC` names another one. `${local_rank}` in `args` is replaced for each worker. The
    script `-` is read from stdin.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()
    interpreter: str = ""
    interpreter_options: tuple[str, ...] = ()

    @property
    def is_on_stdin(self) -> bool:
        """Whether the workers read the script from stdin."""
        return self.kind is ProgramKind.SCRIPT and self.target == "-"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of a freshly started worker."""
        python = (self.interpreter, *self.interpreter_options, "-u")
        match self.kind:
            case ProgramKind.SCRIPT:
                return (*python, self.target, *self.args)
            case ProgramKind.MODULE:
                return (*python, "-m", self.target, *self.args)
            case ProgramKind.COMMAND:
                return (self.target, *self.args)


@dataclass(frozen=True)
class JobSpec:
    """The job as one agent's command line has it: its name, the program, and what all nodes must agree on."""

    run_id: str
    program: Program
    nodes_min: int = 1
    nodes_max: int = 1
    max_restarts: int = 3
    restart_window_s: float | None = None
    exclude_after: int = 0

    @property
    def terms(self) -> Terms:
        """What nodes compare. Interpreters may differ: each host has its own."""
        program = self.program
        parts = [program.kind.value, program.target, *program.args]
        digest = sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]
        module = ["-m"] if program.kind is ProgramKind.MODULE else []
        command = shlex.join([*module, program.target, *program.args])
        # A lone surrogate (a byte of another encoding in argv) has no JSON text.
        shown = command.encode(errors="backslashreplace").decode()
        budget = self.max_restarts, self.restart_window_s
        return Terms(self.nodes_min, self.nodes_max, *budget, shown, digest, self.exclude_after)
