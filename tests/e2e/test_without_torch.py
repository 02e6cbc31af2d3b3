"""A program that does not name torch is not made to wait for it, and gets it all the same if it imports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import finished, script
from tests.standin import with_dynamo

# pydoc imports the module of a name, which the text of a program need not show.
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
