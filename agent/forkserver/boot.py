"""The agent's first message to a fork server, and the command line and environment that start one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.linux import memory_file
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.job_spec import Program

BOOT_VARIABLE = "ELAUNCH_BOOT"
# The first word of the variable in a fresh worker, which is not to pause.
FRESH = "fresh"
# The modules of the standard library that a report of the program's end needs, and that a bare Python has not loaded.
# A program with a module of such a name beside it must get its own: it makes no report.
NEEDED = ("threading", "functools", "collections", "types", "keyword", "operator", "reprlib", "_weakrefset")
# The name of a fork server that stays, as `ps -o comm` shows it.
PROCESS_NAME = "elaunch-warm"
HOOK_DIR = str(Path(__file__).with_name("hook"))


@dataclass(frozen=True)
class Boot:
    """The agent's first message to its fork server.

    `preload` names the modules to import. None means that each worker execs a fresh interpreter; `fallback` is then the
    reason, unless the user asked for it. `left_out` has sentences on what of `preload` workers import themselves, for
    the log. `packages` are what else the program's text imports (`ProgramText.packages`). `pythonpath` is the user's
    PYTHONPATH. `ignored` are signals that workers ignore from their start. `mask` is set in a fork server that has
    started anew: the signals that were blocked when the agent started it. `facts` and `environment` are set if the fork
    server may stay for later runs (see warm.py): what must be equal in these, as names and values.
    """

    agent_pid: int
    control_fd: int
    program: Program
    preload: tuple[str, ...] | None
    pythonpath: str | None
    ignored: tuple[int, ...] = ()
    fallback: str = ""
    left_out: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    mask: tuple[int, ...] | None = None
    facts: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def memfd(self) -> int:
        """A new descriptor from which this process, or one that inherits it, can `read` the message."""
        return memory_file("elaunch-boot", encode(self), outlives_exec=True)

    @classmethod
    def read(cls, fd: int) -> Boot:
        """Read the message from `fd`, and close `fd`."""
        with open(fd) as file:
            return decode(cls, file.read())


def hooked(environment: Mapping[str, str], crash_fd: int, *, reports: bool) -> dict[str, str]:
    """The variables by which a fresh worker's interpreter runs elaunch's sitecustomize (see fresh.py).

    `reports` says that the worker is to tell its agent how its program ends.
    """
    path = environment.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{path}" if path else HOOK_DIR,
        BOOT_VARIABLE: f"{FRESH} {crash_fd} {'unset' if path is None else 'set'} {int(reports)}",
    }


def bare_command(module: str, call: str, *args: str) -> list[str]:
    """The command line of a Python that calls `call` of a module beside this one with `args`.

    It starts without site: .pth files and customisations may run any code, and a process that only execs does not need
    them.
    """
    code = (
        "import sys; there = [p for p in sys.path if p]; sys.path = [*there, sys.argv[1]]; "
        f"from {__package__}.{module} import {call}; sys.path = there; {call}(*sys.argv[2:])"
    )
    return [sys.executable, "-S", "-c", code, str(Path(__file__).parents[3]), *args]


def pausing(environment: Mapping[str, str], boot_fd: int) -> dict[str, str]:
    """`environment` with the variables that make an interpreter stop in elaunch's sitecustomize (see pause.py)."""
    path = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{path}" if path else HOOK_DIR,
        BOOT_VARIABLE: str(boot_fd),
    }
