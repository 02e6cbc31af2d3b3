"""Copies of each step of a communication hook's state, in one process."""

from __future__ import annotations

import errno
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
