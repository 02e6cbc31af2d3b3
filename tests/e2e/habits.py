"""Runs one program three ways: in a fresh `python -u`, in a forked worker, and in a worker with --no-preload."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.environment import DEFAULT_PRELOAD
from tests.harness import DEADLINE_S, FRESH, LIGHT, environment

TORCH = ("--preload", ",".join(DEFAULT_PRELOAD))


@dataclass(frozen=True)
class Run:
    """How a program ended. `logged` are the launcher's own lines, `err` is the rest of stderr."""

    code: int
    out: bytes
    err: bytes
    logged: tuple[str, ...] = ()

    def __str__(self) -> str:
        logged = "\n".join(self.logged)
        return (
            f"exit code {self.code}\n{self.out.decode(errors='replace')}\n{self.err.decode(errors='replace')}\n{logged}"
        )


def fresh(
    folder: Path,
    *args: str | bytes,
    env: Mapping[str, str] | None = None,
    python: Sequence[str] = (sys.executable,),
    stdin: bytes = b"",
) -> Run:
    """The program in a real fresh interpreter. `python` are the interpreter and its options."""
    ended = _run(folder, [*python, "-u", *args], env, stdin)
    return Run(ended.returncode, _without_addresses(ended.stdout), _without_addresses(ended.stderr))


def worker(
    folder: Path,
    *args: str | bytes,
    how: Sequence[str] = LIGHT,
    env: Mapping[str, str] | None = None,
    python: Sequence[str] = (sys.executable,),
    stdin: bytes = b"",
) -> Run:
    """The program as a worker of a plain launch; further options of elaunch go in `how`."""
    # Start elaunch as the installed command does: `-m elaunch` would put the current folder on the agent's import path.
    agent = [*python, "-c", "import sys; sys.path[:1] = []; from elaunch.launcher.cli import main; main()"]
    plain = () if "--max-restarts" in how else ("--max-restarts", "0")
    ended = _run(folder, [*agent, *how, *plain, *args], env, stdin)
    lines = _without_addresses(ended.stderr).splitlines(keepends=True)
    return Run(
        ended.returncode,
        _without_addresses(ended.stdout),
        b"".join(line for line in lines if not line.startswith(b"elaunch: ")),
        tuple(line.decode(errors="replace").rstrip("\n") for line in lines if line.startswith(b"elaunch: ")),
    )


def same(
    folder: Path,
    *args: str | bytes,
    env: Mapping[str, str] | None = None,
    python: Sequence[str] = (sys.executable,),
    stdin: bytes = b"",
    no_preload: bool = False,
) -> Run:
    """Run the program fresh and as a forked worker, with `no_preload` also in a worker that is not forked.

    Fails unless exit code, stdout and stderr are the same. Returns the fresh run.
    """
    expected = fresh(folder, *args, env=env, python=python, stdin=stdin)
    for how in (LIGHT, FRESH) if no_preload else (LIGHT,):
        run = worker(folder, *args, how=how, env=env, python=python, stdin=stdin)
        assert run.code == min(expected.code, 1), f"{how}: {run}"
        assert run.out == expected.out, f"{how}: {run}\nfresh: {expected}"
        if expected.code == 0:
            assert run.err == expected.err, f"{how}: {run}\nfresh: {expected}"
        else:
            # The report of a failed job follows what the worker wrote.
            assert run.err.startswith(expected.err), f"{how}: {run}\nfresh: {expected}"
            assert re.search(rf"exitcode +: {expected.code}\b", str(run)), f"{how}: {run}\nfresh: {expected}"
        if how == LIGHT:
            assert not any("fresh interpreter" in line for line in run.logged), str(run)
    return expected


def _without_addresses(text: bytes) -> bytes:
    """The text without addresses, and without the pid in Python's own warnings."""
    return re.sub(rb"\(pid=\d+\)", b"(pid)", re.sub(rb"\b0x[0-9a-f]{8,}", b"0x", text))


def _run(
    folder: Path, command: Sequence[str | bytes], env: Mapping[str, str] | None, stdin: bytes
) -> subprocess.CompletedProcess[bytes]:
    temporary = folder / ".tmp"
    temporary.mkdir(exist_ok=True)
    # Set two threads for all: the number that the launcher chooses would differ from that of a fresh process.
    chosen = {"OMP_NUM_THREADS": "2", "TMPDIR": os.fspath(temporary), **(env or {})}
    # The job must not get the PYTHON variables of the tests' own interpreter.
    environ = {n: v for n, v in environment(chosen).items() if not n.startswith(("PYTHON", "PYTEST")) or n in chosen}
    return subprocess.run(
        command,
        cwd=folder,
        env=environ,
        input=stdin,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
        start_new_session=True,
    )
