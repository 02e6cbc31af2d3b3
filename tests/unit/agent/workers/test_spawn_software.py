"""agent.workers.spawn: which torch and Python the workers have."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from elaunch import __version__
from elaunch.agent.workers import spawn
from elaunch.rendezvous.job_spec import Program, ProgramKind

PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}, elaunch {__version__}"


@pytest.mark.parametrize("torch", ["2.13.0+cpu", ""])
def test_the_versions_are_those_of_the_workers_interpreter(torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        if not torch:
            raise PackageNotFoundError
        return torch

    monkeypatch.setattr(spawn, "version", version)

    assert spawn.software(Program(ProgramKind.SCRIPT, "train.py", interpreter="/other")) == f"elaunch {__version__}"
    words = f"torch {torch}, {PYTHON}" if torch else PYTHON
    assert spawn.software(Program(ProgramKind.SCRIPT, "train.py", interpreter=sys.executable)) == words
