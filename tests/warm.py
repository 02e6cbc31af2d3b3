"""Fork servers that stay, for tests: each test has a folder of its own for them, and leaves none."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness import COMMAND, DEADLINE_S, environment, script, wait_for


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
