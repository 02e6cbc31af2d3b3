"""A program that does not name torch is not made to wait for it, and gets it all the same if it imports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import patience
from tests.harness import finished, script
from tests.standin import with_dynamo

# Notes who imports it. The worker store does so when no rank has come for a while, as on a busy host.
TORCH = """
import os
BY = os.getpid()
if open("/proc/self/comm").read() != "elaunch-store\\n":
    open(f"imported.{BY}", "w").close()
"""
# pydoc imports the module of a name, which the text of a program need not show.
UNSEEN = "import pydoc\nprint('found', pydoc.locate('tor' + 'ch').BY == os.getpid())\n"


@pytest.mark.parametrize("imports", ["", UNSEEN], ids=["nothing", "unseen"])
def test_torch_is_not_imported_for_a_program_that_does_not_name_it(tmp_path: Path, imports: str) -> None:
    (tmp_path / "lib").mkdir()
    script(tmp_path / "lib", TORCH, "torch.py")
    script(tmp_path, f"import gc, os\nprint('forked', gc.get_freeze_count() > 0)\n{imports}")

    job = finished(tmp_path, "train.py", env={"PYTHONPATH": os.fspath(tmp_path / "lib")})

    assert job.code == 0, job.stderr
    assert "forked True" in job.stdout
    assert len(list(tmp_path.glob("imported.*"))) == (1 if imports else 0)
    assert "found False" not in job.stdout
    assert "interpreter" not in job.stderr


def test_a_program_that_has_not_imported_torch_is_known_by_that_at_its_next_start(tmp_path: Path) -> None:
    """Its text does not say it: it imports a package that might import torch."""
    (tmp_path / "lib").mkdir()
    script(tmp_path / "lib", TORCH, "torch.py")
    script(tmp_path / "lib", "", "harmless.py")
    script(tmp_path, "import sys, harmless\nif sys.argv[1:]: import torch\n")
    env = {"PYTHONPATH": os.fspath(tmp_path / "lib"), "XDG_CACHE_HOME": os.fspath(tmp_path / "cache")}
    counts = []

    for arguments in ([], [], ["with torch"]):
        job = patience.finished(patience.DISK, tmp_path, "train.py", *arguments, env=env)
        assert job.code == 0, job.stderr
        counts.append(len(list(tmp_path.glob("imported.*"))))

    assert counts[:2] == [1, 1]
    # With other arguments it may be another program.
    assert counts[2] > 1


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_syntax_error_of_a_program_is_said_before_torch_is_imported(tmp_path: Path, kind: str) -> None:
    (tmp_path / "lib").mkdir()
    script(tmp_path / "lib", TORCH, "torch.py")
    script(tmp_path, "import torch\ntorch.optim.SGD(")
    command = {"script": ["train.py"], "module": ["-m", "train"]}[kind]

    job = finished(tmp_path, *command, env={"PYTHONPATH": os.fspath(tmp_path / "lib")})

    assert job.code == 1
    assert "SyntaxError: '(' was never closed" in job.stderr
    # The package of a module would run before it.
    assert len(list(tmp_path.glob("imported.*"))) == (0 if kind == "script" else 1)


# A stand-in for a home whose disk hangs: what is remembered of this program is never written.
HANGS = """
import os, time

replace = os.replace
os.replace = lambda source, to: time.sleep(600) if "/imports/" in str(to) else replace(source, to)
"""


def test_a_job_ends_although_what_it_has_learned_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    script(tmp_path / "lib", HANGS, "sitecustomize.py")
    script(tmp_path / "lib", TORCH, "torch.py")
    script(tmp_path / "lib", "", "harmless.py")
    script(tmp_path, "import harmless\nprint('done')")
    env = {"PYTHONPATH": os.fspath(tmp_path / "lib"), "XDG_CACHE_HOME": os.fspath(tmp_path / "cache")}

    job = finished(tmp_path, "train.py", env=env)

    assert job.code == 0, job.stderr
    assert "done" in job.stdout
    # It has tried.
    assert len(list((tmp_path / "cache" / "elaunch" / "imports").iterdir())) == 1


IN_WORKER = "import pydoc, torch\npydoc.locate('torch._dyn' + 'amo')\n"


@pytest.mark.parametrize(
    ("program", "counts"),
    [
        ("import torch, harmless", [1, 1]),
        ("import torch", [0, 0]),
        (IN_WORKER, [2, 3]),
    ],
    ids=["its text does not say it", "its text says it", "its text is wrong"],
)
def test_torch_is_imported_without_dynamo_for_a_program_that_does_not_use_it(
    tmp_path: Path, program: str, counts: list[int]
) -> None:
    lib = tmp_path / "lib"
    with_dynamo(lib)
    script(lib, "", "harmless.py")
    script(tmp_path, program)
    env = {"PYTHONPATH": os.fspath(tmp_path / "lib"), "XDG_CACHE_HOME": os.fspath(tmp_path / "cache")}
    seen = []

    for _ in counts:
        job = patience.finished(patience.DISK, tmp_path, "--nproc-per-node", "2", "train.py", env=env)
        assert job.code == 0, job.stderr
        assert "interpreter" not in job.stderr
        seen.append(len(list(tmp_path.glob("dynamo.*"))))

    assert seen == counts
