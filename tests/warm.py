"""Fork servers that stay, for tests: in a folder of the test's own, or one that tests of other things share."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.forkserver.warm.client import Cold, WarmKind, connected, greeted
from elaunch.agent.forkserver.warm.handover import MARKER_ROOM
from elaunch.agent.forkserver.warm.keeping import leave_behind, servers, stop
from elaunch.agent.forkserver.warm.place import NoPlace, folder
from elaunch.agent.guardian.guardian import VARIABLE
from elaunch.rendezvous.job_spec import Program, ProgramKind
from tests.harness import COMMAND, DEADLINE_S, environment, script, wait_for
from tests.standin import WITH_TORCH

# How long a fork server stays without a job if the processes of the run that share it were killed.
_IDLE_S = 900.0


def states(env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What `elaunch warm --status --json` says."""
    found = command("--status", "--json", env=env)
    said: list[dict[str, Any]] = json.loads(found.stdout)
    return said


def command(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The end of `elaunch warm` with these arguments."""
    words = [*COMMAND, "warm", *args]
    return subprocess.run(words, env=environment(env), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def stayed(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The state of the one fork server that stays, once it has imported."""
    return wait_for(
        lambda: next((each for each in states(env) if "pid" in each), None), "a fork server that stays", every_s=0.1
    )


def run(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The end of a job."""
    # subprocess.DEVNULL is open for writing too.
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        return subprocess.run(
            [*COMMAND, *words],
            cwd=folder,
            env=environment(env),
            stdin=nothing,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


def leave_one(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a job that leaves a fork server behind; what that says of itself."""
    ended = run(folder, *words, os.fspath(script(folder, "", "nothing.py")), env=env)
    assert "a fork server stays" in ended.stderr, ended.stderr
    return stayed(env)


@contextmanager
def own_place(place: Path) -> Iterator[Path]:
    """Let commands of this process keep fork servers in `place`, and end them at the end."""
    place.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", os.fspath(place))
        try:
            yield place / "elaunch_warm"
        finally:
            command("--stop")


@contextmanager
def silent_server(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A fork server at `path`, as it is before it has its name, whose Python waits for its files."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        process = subprocess.Popen(
            ["sleep", "600"], env={**os.environ, VARIABLE: "-" * MARKER_ROOM}, pass_fds=[listener.fileno()]
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


@dataclass(frozen=True)
class SharedStart:
    """How a job starts from a fork server that all processes of a test run share: `options` and `env` of its command.

    Where it may not, it starts cold, as without them; it leaves no other fork server behind. It is for tests of what
    happens after the start. The fork server is then no child of the agent.
    """

    options: tuple[str, ...]
    env: Mapping[str, str]


@contextmanager
def shared_start(place: Path, *modules: str) -> Iterator[SharedStart]:
    """A fork server in `place` that has imported `modules`. The first process of a run that comes here starts it.

    The last one to leave ends it.
    """
    place.mkdir(mode=0o700, exist_ok=True)
    # What may have been read while it imported must be the same in each job.
    folders = {"HOME": place, "XDG_RUNTIME_DIR": place, "XDG_CACHE_HOME": place / "cache"}
    env = {**{name: os.fspath(path) for name, path in folders.items()}, "OMP_NUM_THREADS": "1", **WITH_TORCH}
    with _alone_in(place):
        kind = WarmKind(Program(ProgramKind.SCRIPT, "any.py", (), sys.executable), modules)
        # Without a place each job starts cold.
        with suppress(NoPlace, OSError):
            leave_behind(kind, environment(env), (), _IDLE_S, in_place=False)
        for path in servers():
            _wait_for_imports(path)
        # As long as a process of the run has this lock, no job leaves a fork server behind.
        folder(os.environ).mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder(os.environ) / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield SharedStart(("--warm", "--preload-only", ",".join(modules)), env)
    finally:
        with _alone_in(place), lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in servers():
                stop(path)


@contextmanager
def _alone_in(place: Path) -> Iterator[None]:
    """This process looks for fork servers in `place`. No other process of the run does so meanwhile."""
    with (place / "turn").open("w") as turn, pytest.MonkeyPatch.context() as patched:
        wait_for(lambda: _is_locked(turn.fileno()), f"this process's turn in {place}")
        patched.setenv("XDG_RUNTIME_DIR", os.fspath(place))
        yield


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_imports(path: Path) -> None:
    """Wait until the fork server has imported, or has ended: it does so when memory is short."""

    def is_over() -> bool:
        try:
            with connected(path) as connection:
                with suppress(Cold):
                    greeted(connection)
                    return True
                return False
        except Cold:
            return True

    wait_for(is_over, f"the imports of the fork server of {path}")
