"""agent.workers.spawn: the locks of torch extensions' builds are named."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from elaunch.agent.workers.spawn import warn_of_locks
from tests.harness import DEADLINE_S


@pytest.mark.parametrize("kind", ["", "py311_cpu"], ids=["chosen by the user", "for a kind of torch"])
def test_a_lock_is_named_with_its_age_and_other_files_are_not(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind / "fused_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    os.utime(folder / "lock", (0, 0))
    for name, content in {"other": "1", "stale": ""}.items():
        (tmp_path / kind / name).mkdir()
        (tmp_path / kind / name / ("lock" if content else "lock.txt")).write_text(content)
    warnings: queue.Queue[str] = queue.Queue()

    warn_of_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, warnings.put)

    warning = warnings.get(timeout=DEADLINE_S)
    assert warning.startswith(f"{folder / 'lock'} is the lock of a torch extension's build, ")
    assert warning.endswith(f": rm {folder / 'lock'}")
    assert warnings.empty()
