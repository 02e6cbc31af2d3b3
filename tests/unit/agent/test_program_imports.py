"""Which packages a program imports, and what of the default preload it cannot use, from its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.agent.environment import DEFAULT_PRELOAD
from elaunch.agent.program_imports import program_text
from elaunch.rendezvous.types import ProgramKind

USES_ALL, USES_TORCH, USES_NOTHING = (), ("torch._dynamo",), DEFAULT_PRELOAD


def tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def unused(kind: ProgramKind, target: str) -> tuple[str, ...]:
    return program_text(kind, target).unused


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.optim.SGD",
        "def later():\n    from torch.nn.parallel import DistributedDataParallel",
        "import torch, model",
        "import lightning",
        "__import__('to' + 'rch')",
        "exec(open('other.py').read())",
        "import torch, helper",
        "import torch\nfrom package import deep",
        "import no_such_module",
        "not python: \0",
        "import torch\n" + 20_000 * "'a long text'\n",
    ],
)
def test_a_program_that_may_use_all(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import second", "second.py": "make = optim"})
    package = {"package/__init__.py": "", "package/deep.py": "net = compiled()"}
    tree(tmp_path, {**package, "model.py": "DDP = 'parallel'"})

    assert unused(ProgramKind.SCRIPT, str(tmp_path / "t.py")) == USES_ALL


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "import helper",
        "from helper import thing",
        "import package.deep",
        # torch._dynamo reads it at its import.
        "import os\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\nimport torch\ntorch.optim.SGD",
    ],
)
def test_a_program_of_torch_without_an_optimizer(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import second", "second.py": "import torch"})
    tree(tmp_path, {"package/__init__.py": "", "package/deep.py": "import torch"})

    assert unused(ProgramKind.SCRIPT, str(tmp_path / "t.py")) == USES_TORCH


@pytest.mark.parametrize(
    "text",
    [
        "import os, sys, json, concurrent.futures",
        "import helper",
        "from package import deep, NAME",
        "optimizer, parallel = 'SGD', 8",
        "s = '\\d'",
        "# No torch here.\nmodel.eval()",
    ],
)
def test_a_program_without_torch(tmp_path: Path, text: str, recwarn: pytest.WarningsRecorder) -> None:
    tree(tmp_path, {"t.py": text, "helper.py": "import t, subprocess", "package/__init__.py": "NAME = 1"})
    tree(tmp_path, {"package/deep.py": "from . import NAME"})

    assert unused(ProgramKind.SCRIPT, str(tmp_path / "t.py")) == USES_NOTHING
    assert not recwarn


@pytest.mark.parametrize("text", ["import torch\ntorch.optim.SGD(", "not python at all"])
def test_a_text_that_python_refuses(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"t.py": text, "works.py": "import t", "app/__init__.py": "import torch", "app/__main__.py": text})

    assert program_text(ProgramKind.SCRIPT, str(tmp_path / "t.py")).is_refused
    assert not program_text(ProgramKind.SCRIPT, str(tmp_path / "works.py")).is_refused
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        # The package runs before it.
        assert not program_text(ProgramKind.MODULE, "app").is_refused


@pytest.mark.parametrize(
    ("text", "packages"),
    [
        ("import torch, numpy as np", ()),
        ("import lightning as L, os", ("lightning",)),
        ("from lightning.pytorch import Trainer", ("lightning.pytorch:Trainer",)),
        (
            "from transformers import (  # all of it\n    Trainer as T,\n    AutoModel,\n)",
            ("transformers:Trainer", "transformers:AutoModel"),
        ),
        ("from transformers import A, \\\n    B", ("transformers:A", "transformers:B")),
        ("try:\n    import peft; import trl\nexcept ImportError: pass", ("peft", "trl")),
        ("from timm import *", ("timm",)),
        ("import torch\ntorch.optim\nimport helper", ("accelerate",)),
        ("from package.sub import part", ("datasets",)),
        ("import ignite", ()),
        ("import package", ()),
        ("import lightning_of_mine, wandb", ()),
        ("import os\nos.environ['HF_HOME'] = 'cache'\nimport transformers", ()),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport transformers", ()),
        ("import torch, sets_variables, lightning", ()),
    ],
)
def test_packages_that_the_text_imports(tmp_path: Path, text: str, packages: tuple[str, ...]) -> None:
    files = {"t.py": text, "helper.py": "import accelerate", "sets_variables.py": "HF_TOKEN = 1", "ignite.py": ""}
    inner = {"package/__init__.py": "", "package/part.py": "import datasets\nimport t"}
    tree(tmp_path, {**files, **inner})
    (tmp_path / "package/sub").mkdir()
    tree(tmp_path, {"package/sub/__init__.py": "from .. import part", "package/sub/part.py": ""})

    assert program_text(ProgramKind.SCRIPT, str(tmp_path / "t.py")).packages == packages
