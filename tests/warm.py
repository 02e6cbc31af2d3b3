"""Fork servers that stay, for tests, in a folder of the test's own; and the options of jobs that import torch alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.forkserver.client import Cold, connected, servers
from tests.harness import COMMAND, DEADLINE_S, environment
from tests.standin import WITH_TORCH


def states() -> list[dict[str, Any]]:
    """The handshakes of the fork servers that stay."""
    found = []
    with suppress(Cold):
        for path in servers():
            with connected(path) as (_, handshake):
                found.append(handshake)
    return found


def command(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The end of `elaunch warm` with these arguments."""
    words = [*COMMAND, "warm", *args]
    return subprocess.run(words, env=environment(env), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


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


@dataclass(frozen=True)
class SharedStart:
    """`options` and `env` of a job that imports some modules and nothing else before it forks."""

    options: tuple[str, ...]
    env: Mapping[str, str]

    @classmethod
    def of(cls, *modules: str) -> SharedStart:
        return cls(("--preload", ",".join(modules)), {"OMP_NUM_THREADS": "1", **WITH_TORCH})
