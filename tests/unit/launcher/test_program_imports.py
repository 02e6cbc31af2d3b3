"""Which programs may import torch, from their text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.launcher.program_imports import may_import_torch
from elaunch.rendezvous.job_spec import ProgramKind

PACKAGE = {"app/__init__.py": "", "app/__main__.py": "from . import model\nfrom .data import load", "app/data.py": ""}


def tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "def later():\n    from torch.nn import Linear",
        "import lightning",
        "import importlib",
        "from importlib import import_module",
        "__import__('to' + 'rch')",
        "import pydoc\npydoc.locate('torch.nn')",
        "exec(open('other.py').read())",
        "import helper",
        "from helper import thing",
        "import package.deep",
        "from package import deep",
        "import no_such_module",
        "not python at all",
        "from .. import above",
        "\0",
    ],
)
def test_a_program_that_may_import_torch(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import second", "second.py": "import torch"})
    tree(tmp_path, {"package/__init__.py": "", "package/deep.py": "import torch"})

    assert may_import_torch(ProgramKind.SCRIPT, str(tmp_path / "t.py"))


@pytest.mark.parametrize(
    "text",
    [
        "import os, sys, json, concurrent.futures",
        "from os.path import join\nimport numpy as np",
        "import helper",
        "from package import deep, NAME",
        "import package.deep",
        "s = '\\d'",
        "'A program without torch.'\n# No torch here.\ndef f():\n    'Nor torch here.'",
    ],
)
def test_a_program_that_does_not(tmp_path: Path, text: str, recwarn: pytest.WarningsRecorder) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import t, subprocess", "package/__init__.py": "NAME = 1"})
    tree(tmp_path, {"package/deep.py": "from . import NAME"})

    assert not may_import_torch(ProgramKind.SCRIPT, str(tmp_path / "t.py"))
    assert not recwarn


@pytest.mark.parametrize(("model", "may"), [("import torch", True), ("import math", False)])
def test_a_package_is_searched_as_a_module_and_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, may: bool
) -> None:
    tree(tmp_path, {**PACKAGE, "app/model.py": model})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    assert may_import_torch(ProgramKind.MODULE, "app") == may
    assert may_import_torch(ProgramKind.MODULE, "app.model") == may
    assert may_import_torch(ProgramKind.MODULE, "json.tool")


def test_what_cannot_be_read_may_import_torch(tmp_path: Path) -> None:
    assert may_import_torch(ProgramKind.SCRIPT, "-")
    assert may_import_torch(ProgramKind.SCRIPT, str(tmp_path / "no.py"))
    assert may_import_torch(ProgramKind.SCRIPT, str(tmp_path))


def test_a_program_in_a_pipe_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "program"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    os.write(writer, b"print(1)")
    os.close(writer)

    assert may_import_torch(ProgramKind.SCRIPT, str(pipe))

    assert os.read(reader, 100) == b"print(1)"
    os.close(reader)
