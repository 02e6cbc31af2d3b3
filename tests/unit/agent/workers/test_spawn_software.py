"""agent.workers.spawn: which torch and Python the workers have."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from elaunch import __version__
from elaunch.agent.workers.spawn import software
from elaunch.rendezvous.job_spec import Program, ProgramKind

OURS = Program(ProgramKind.SCRIPT, "train.py", interpreter=sys.executable)
PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}, elaunch {__version__}"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("__version__ = '2.13.0+cpu'\ndebug = False\n", f"torch 2.13.0+cpu, {PYTHON}"),
        ('x = 1\n__version__ = "2.9.0a0+git12"', f"torch 2.9.0a0+git12, {PYTHON}"),
        ("from .other import __version__\n", PYTHON),
        (None, PYTHON),
    ],
)
def test_torchs_version_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('torch is imported')")
    if version is not None:
        (package / "version.py").write_text(version)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()

    assert software(OURS) == words
