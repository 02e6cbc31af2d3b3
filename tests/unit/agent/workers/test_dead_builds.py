"""agent.workers.dead_builds: one wait for all that killed builders have left."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from elaunch.agent.workers.dead_builds import DeadBuilds


def test_a_look_waits_once_for_all_locks_and_libraries_of_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    said: list[str] = []
    for number in range(20):
        folder = tmp_path / "cpu" / f"op{number}"
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "op.so").touch()
    monkeypatch.setattr(time, "sleep", waits.append)

    caches = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none")}
    DeadBuilds(caches, said.append).remove()

    assert [sentence.rpartition(".so: ")[0] != "" for sentence in said] == [True] * 20 + [False] * 20
    assert not list(tmp_path.rglob("*.so"))
    assert not list(tmp_path.rglob("lock"))
    assert len(waits) == 1


def test_what_a_killed_compiler_leaves_is_removed_before_each_generation(tmp_path: Path) -> None:
    said: list[str] = []
    builds = DeadBuilds({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, said.append)
    (tmp_path / "ab").mkdir()
    shutil.copy(sys.executable, tmp_path / "ab" / "whole.so")

    for number in range(3):
        builds.remove()
        (tmp_path / "ab" / f"cut{number}.so").touch()
    builds.remove()

    assert [path.name for path in tmp_path.rglob("*.so")] == ["whole.so"]
    assert len(said) == 3
