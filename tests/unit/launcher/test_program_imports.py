"""What of the default preload a program cannot use, from its text."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.agent.default_preload import DEFAULT_PRELOAD
from elaunch.launcher.program_imports import needless_imports
from elaunch.rendezvous.job_spec import ProgramKind

ALL, NO_DYNAMO, NOTHING = (), ("torch._dynamo",), DEFAULT_PRELOAD
# Hundreds of processes.
WALK_S = 800
PACKAGE = {"app/__init__.py": "", "app/__main__.py": "from . import model\nfrom .data import load", "app/data.py": ""}


def tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.optim.SGD",
        "def later():\n    from torch.nn.parallel import DistributedDataParallel",
        "import torch, model",
        "import lightning",
        "import torch, lightning",
        "import importlib",
        "from importlib import import_module",
        "__import__('to' + 'rch')",
        "exec(open('other.py').read())",
        "import torch, helper",
        "import torch\nfrom helper import thing",
        "import torch, package.deep",
        "import torch\nfrom package import deep",
        "import no_such_module",
        "from .. import above",
        "not python: \0",
        "import torch\n" + 20_000 * "# a long text",
        "import torch, broken",
    ],
)
def test_a_program_that_may_use_all(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import second", "second.py": "make = optim"})
    tree(
        tmp_path,
        {
            "package/__init__.py": "",
            "package/deep.py": "net = compiled()",
            "model.py": "DDP = 'parallel'",
            "broken.py": ")",
        },
    )

    assert needless_imports(ProgramKind.SCRIPT, str(tmp_path / "t.py")) == ALL


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import json, torch as t\nprint(t.__version__)",
        "def later():\n    from torch.nn import Linear",
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "import helper",
        "from helper import thing",
        "import package.deep",
        "from package import deep",
        "import pydoc\npydoc.locate('torch.nn')",
    ],
)
def test_a_program_of_torch_without_an_optimizer(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import second", "second.py": "import torch"})
    tree(tmp_path, {"package/__init__.py": "", "package/deep.py": "import torch"})

    assert needless_imports(ProgramKind.SCRIPT, str(tmp_path / "t.py")) == NO_DYNAMO


@pytest.mark.parametrize(
    "text",
    [
        "import os, sys, json, concurrent.futures",
        "from os.path import join\nimport numpy as np",
        "import helper",
        "from package import deep, NAME",
        "import package.deep",
        "optimizer, parallel = 'SGD', 8",
        "import torch\ntorch.optim.SGD(",
        "s = '\\d'",
        "'A program without torch.'\n# No torch here.\ndef f():\n    'Nor torch here.'",
    ],
)
def test_a_program_without_torch(tmp_path: Path, text: str, recwarn: pytest.WarningsRecorder) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import t, subprocess", "package/__init__.py": "NAME = 1"})
    tree(tmp_path, {"package/deep.py": "from . import NAME"})

    assert needless_imports(ProgramKind.SCRIPT, str(tmp_path / "t.py")) == NOTHING
    assert not recwarn


@pytest.mark.parametrize(("model", "needless"), [("import torch", NO_DYNAMO), ("import math", NOTHING)])
def test_a_package_is_searched_as_a_module_and_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, needless: tuple[str, ...]
) -> None:
    tree(tmp_path, {**PACKAGE, "app/model.py": model})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    assert needless_imports(ProgramKind.MODULE, "app") == needless
    assert needless_imports(ProgramKind.MODULE, "app.model") == needless
    assert needless_imports(ProgramKind.MODULE, "json.tool") == ALL


# Imports each of torch's public modules in a process of its own, and says which of them ask for torch._dynamo.
WALKS = """
import importlib, os, sys
import torch.distributed

class Tells:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            os._exit(77)

sys.meta_path.insert(0, Tells())
for name in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        try:
            importlib.import_module(name)
        finally:
            os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77:
        print(name)
"""


@pytest.mark.slow
def test_no_public_module_of_torch_imports_dynamo_without_such_a_word_in_its_name(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]).parent
    files = (path.relative_to(root).with_suffix("") for path in root.glob("torch/**/*.py"))
    names = {".".join(part for part in file.parts if part != "__init__") for file in files}
    public = sorted(name for name in names if not re.search(r"\._|\.(testing|test|include|lib)\b", name))
    assert len(public) > 500

    walk = subprocess.run(
        [sys.executable, "-c", WALKS, *public], capture_output=True, text=True, check=True, timeout=WALK_S
    )

    importing = walk.stdout.split()
    assert importing
    for name in importing:
        script = tmp_path / "t.py"
        script.write_text(f"import {name}")
        assert needless_imports(ProgramKind.SCRIPT, str(script)) == ALL, name


def test_what_cannot_be_read_may_use_all(tmp_path: Path) -> None:
    assert needless_imports(ProgramKind.SCRIPT, "-") == ALL
    assert needless_imports(ProgramKind.SCRIPT, str(tmp_path / "no.py")) == ALL
    assert needless_imports(ProgramKind.SCRIPT, str(tmp_path)) == ALL


def test_a_program_in_a_pipe_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "program"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    os.write(writer, b"print(1)")
    os.close(writer)

    assert needless_imports(ProgramKind.SCRIPT, str(pipe)) == ALL

    assert os.read(reader, 100) == b"print(1)"
    os.close(reader)
