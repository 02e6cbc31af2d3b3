"""Copies of each step of a communication hook's state, in one process."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.memory.records import Records
from elaunch.trainer.state.version import Version
from tests.unit.trainer.keeper.test_keeper import Feedback

pytestmark = pytest.mark.usefixtures("memory")


def test_after_a_copy_that_did_not_fit_none_is_tried_before_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, keep = set(), Records.keep

    def keep_but_3(self: Records, version: Version, *rest: Any) -> torch.Tensor:
        tried.add(version.step)
        if version.step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(self, version, *rest)

    monkeypatch.setattr(Records, "keep", keep_but_3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())

    options: dict[str, Any] = {"snapshot_every": 5, "copy_every": 1, "per_rank": (), "say": lambda text: None}
    with Keeper(model, optimizer, hook_state=Feedback(), **options) as keeper:
        for _ in keeper.steps(9):
            with keeper.commit():
                optimizer.step()

    # At the look after step 6 the ranks agree on a copy of step 7 before they take the snapshot.
    assert tried == {1, 2, 3, 6, 8, 9}


def test_a_start_from_a_checkpoint_says_that_the_hook_begins_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    for steps in (2, 4):
        # Another job's memory: nothing is left but the checkpoint.
        (tmp_path / f"memory-{steps}").mkdir()
        monkeypatch.setenv("ELAUNCH_MEMORY", str(tmp_path / f"memory-{steps}"))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        options: dict[str, Any] = {"checkpoints": tmp_path / "checkpoints", "per_rank": (), "say": said.append}
        with Keeper(model, optimizer, hook_state=Feedback(), **options) as keeper:
            for _ in keeper.steps(steps):
                with keeper.commit():
                    optimizer.step()

    restored = [text for text in said if text.startswith("restored step 2 from the checkpoint in")]
    assert len(restored) == 1
    assert restored[0].endswith("; the communication hook starts with a new state")
