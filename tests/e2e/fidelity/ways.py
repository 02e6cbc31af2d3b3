"""Runs a program both ways: as a worker of elaunch, and by a fresh `python -u` in the same folder and environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaunch.agent.environment import DEFAULT_PRELOAD
from elaunch.launcher.host import detect
from tests.harness import Job, environment

HERE = Path(__file__).parent
# Torch is imported before the fork, also for a program that does not name it.
FORKED = ("--preload", ",".join(DEFAULT_PRELOAD))
# A program may compile something.
_LONG_S = 600.0

# The variables that only a worker has, and not a fresh process. docs/variables.md lists them.
LAUNCHERS = frozenset(
    (
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
        *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("ELAUNCH_GENERATION", "ELAUNCH_GENERATION_SECRET", "ELAUNCH_LINK", "ELAUNCH_MEMORY", "ELAUNCH_MARKER"),
    )
)


@dataclass(frozen=True)
class End:
    """How a program ended: its own exit code, negative for a signal, and what it wrote."""

    code: int
    out: bytes
    err: bytes
    logged_by_agent: str = ""


def share(workers: int) -> str:
    """The OMP_NUM_THREADS that elaunch gives each of so many workers."""
    return str(max(1, detect(environment()).cores // workers))


def fresh(folder: Path, *args: str, env: Mapping[str, str] | None = None, stdin: str | Path = os.devnull) -> End:
    """A fresh interpreter, in a session of its own as a worker is."""
    with open(stdin, "rb") as nothing:  # noqa: PTH123
        found = subprocess.run(
            [sys.executable, "-u", *args],
            cwd=folder,
            # A worker does not get what configured its launcher.
            env={name: value for name, value in _environment(folder, env).items() if not name.startswith("PET_")},
            # subprocess.DEVNULL is open for writing too.
            stdin=nothing,
            capture_output=True,
            start_new_session=True,
            timeout=_LONG_S,
            check=False,
        )
    return End(found.returncode, found.stdout, found.stderr)


def worker(folder: Path, how: tuple[str, ...], *args: str, env: Mapping[str, str] | None = None) -> End:
    """The only worker of a plain launch."""
    options = ("--nproc-per-node", "1", "--max-restarts", "0", "--log-dir", "logs", "-r", "3")
    with Job(folder, *how, *options, *args, env=_environment(folder, env)) as job:
        code = job.wait(_LONG_S)
        logged = job.output
    (logs,) = (folder / "logs").glob("*_*/attempt_0/0")
    # The exit code is in the report, or in the one sentence about a module that is not there.
    own = re.search(r"(?:exitcode +:|; exit code) (-?\d+)", logged)
    assert (code == 0) is (own is None), logged
    return End(
        int(own[1]) if own else 0, (logs / "stdout.log").read_bytes(), (logs / "stderr.log").read_bytes(), logged
    )


def looks(
    folder: Path, how: tuple[str, ...], *args: str, env: Mapping[str, str] | None = None, name: str = "facts"
) -> list[dict[str, Any]]:
    """What two workers that run a probe wrote down, by rank."""
    options = ("--nproc-per-node", "2", "--max-restarts", "0")
    with (
        open(os.devnull, "rb") as nothing,  # noqa: PTH123
        Job(folder, *how, *options, *args, env=_environment(folder, env), stdin=nothing) as job,
    ):
        assert job.wait() == 0, job.output
    return [_record(folder / f"{name}{rank}.json") for rank in range(2)]


def look(folder: Path, *args: str, env: Mapping[str, str] | None = None, name: str = "facts") -> dict[str, Any]:
    """What a fresh interpreter that runs a probe wrote down."""
    end = fresh(folder, *args, env={"OMP_NUM_THREADS": share(2), **(env or {})})
    assert end.code == 0, end.err.decode()
    return _record(folder / f"{name}.json")


def with_crash_stack(name: str, fresh: Any) -> Any:
    """A fresh interpreter's fact as it is with faulthandler, which every worker has (docs/fidelity.md)."""
    if name == "faulthandler_state":
        return True
    if name == "signal_sets":
        return {**fresh, "SigCgt": caught_too(fresh["SigCgt"])}
    return fresh


def differences(names: Iterable[str], worker: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that differ, with both values, but for what each worker has by docs/fidelity.md."""
    found = {}
    for name in names:
        ours, theirs = worker[name], with_crash_stack(name, fresh[name])
        if name.startswith(("environ", "torch_var")):
            # Drop the launcher's variables. Those that the test set for the fresh process too are in both.
            ours = without_launchers(ours)
        if name == "import_hooks":
            # One of elaunch's waits for torch, where that is not preloaded.
            ours = [[hook for hook in ours[0] if hook != "_Finder"], ours[1]]
        if ours != theirs:
            found[name] = (ours, theirs)
    return found


def caught_too(mask: str) -> str:
    """A mask of /proc/PID/status with the signals of faulthandler."""
    crashes = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
    return f"{int(mask, 16) | sum(1 << (signum - 1) for signum in crashes):016x}"


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in LAUNCHERS}


def _record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return record


def _environment(folder: Path, env: Mapping[str, str] | None) -> dict[str, str]:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return environment({"TMPDIR": str(temporary), **(env or {})})
