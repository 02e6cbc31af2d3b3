"""A program that does not name torch is not made to wait for it, and gets it all the same if it imports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import finished, script

# pydoc imports the module of a name, which the text of a program need not show.
UNSEEN = "import pydoc\nprint('found', pydoc.locate('tor' + 'ch').BY == os.getpid())\n"


@pytest.mark.parametrize("imports", ["", UNSEEN], ids=["nothing", "unseen"])
def test_torch_is_not_imported_for_a_program_that_does_not_name_it(tmp_path: Path, imports: str) -> None:
    (tmp_path / "lib").mkdir()
    script(tmp_path / "lib", "import os\nBY = os.getpid()\nopen(f'imported.{BY}', 'w').close()\n", "torch.py")
    script(tmp_path, f"import gc, os\nprint('forked', gc.get_freeze_count() > 0)\n{imports}")

    job = finished(tmp_path, "train.py", env={"PYTHONPATH": os.fspath(tmp_path / "lib")})

    assert job.code == 0, job.stderr
    assert "forked True" in job.stdout
    assert len(list(tmp_path.glob("imported.*"))) == (1 if imports else 0)
    assert "found False" not in job.stdout
    assert "interpreter" not in job.stderr
