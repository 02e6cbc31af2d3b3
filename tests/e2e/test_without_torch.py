"""A program that does not name torch is not made to wait for it, and gets it all the same if it imports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


# A stand-in for a home whose disk hangs: what is remembered of this program is never written.
IN_WORKER = "import pydoc, torch\npydoc.locate('torch._dyn' + 'amo')\n"


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ("import torch, harmless", 1),
        ("import torch", 0),
        (IN_WORKER, 2),
    ],
    ids=["its text does not say it", "its text says it", "its text is wrong"],
)
def test_torch_is_imported_without_dynamo_for_a_program_that_does_not_use_it(
    tmp_path: Path, program: str, count: int
) -> None:
    lib = tmp_path / "lib"
    with_dynamo(lib)
    script(lib, "", "harmless.py")
    script(tmp_path, program)
    env = {"PYTHONPATH": os.fspath(tmp_path / "lib"), "XDG_CACHE_HOME": os.fspath(tmp_path / "cache")}

    job = finished(tmp_path, "--nproc-per-node", "2", "train.py", env=env)

    assert job.code == 0, job.stderr
    assert "interpreter" not in job.stderr
    assert len(list(tmp_path.glob("dynamo.*"))) == count
