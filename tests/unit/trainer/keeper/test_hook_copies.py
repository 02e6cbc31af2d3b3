"""Copies of each step of a communication hook's state, in one process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.trainer.keeper import sync_schedule
from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.keeper.step_copies import StepCopies
from elaunch.trainer.memory.node_memory import Records
from elaunch.trainer.state.region import Version, header_of
from tests.unit.trainer.conftest import trained

pytestmark = pytest.mark.usefixtures("memory", "few_snapshots")


class Feedback:
    """The state of a hook."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@pytest.fixture
def few_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where snapshots take long."""
    monkeypatch.setattr(Copies, "snapshot_every", 5)


def test_after_a_copy_that_did_not_fit_none_is_tried_before_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, keep = set(), Records.keep

    def keep_but_3(self: Records, version: Version, *rest: Any) -> torch.Tensor:
        tried.add(version.step)
        if version.step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(self, version, *rest)

    monkeypatch.setattr(Records, "keep", keep_but_3)
    model = nn.Linear(1, 1)
    trained(model, torch.optim.SGD(model.parameters()), 9, hook_state=Feedback())

    # At the sync point after step 6 the ranks agree on a copy of step 7 before they take the snapshot.
    assert tried == {1, 2, 3, 6, 9}


def test_once_all_ranks_have_a_snapshot_no_saved_step_takes_its_place(memory: Path) -> None:
    job = failed(9)

    # Snapshots after steps 1 and 6. The rescue has saved step 8.
    assert versions(memory) == [Version(0, 6), Version(0, 8)]
    # What died with a node: the copies of each step.
    for header, slot, _ in job._copies._records.versions():  # type: ignore[union-attr]
        if header.version.step > 6:
            slot.discard()
    assert restored() == 6


def test_a_step_without_copies_does_not_take_the_place_of_the_copied_one_before(
    monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    # From some step on, a copy takes too long, and there is a sync point after each step.
    monkeypatch.setattr(StepCopies, "is_ready", lambda self, step: step < 9)
    monkeypatch.setattr(sync_schedule, "WITHIN_S", 0.0)

    def save_step_8(keeper: Keeper) -> None:
        """Another survivor of the node does so: it has not completed step 9."""
        keeper._copies.save_replicated(Version(0, 8))

    failed(10, save_step_8)

    assert versions(memory) == [Version(0, 6), Version(0, 8)]
    assert restored() == 8


def failed(fails_in: int, before: Callable[[Keeper], None] = lambda keeper: None) -> Keeper:
    """A training whose hook's state is copied at each step, after it has failed in that step."""
    keeper = kept(generation=0)

    def train() -> None:
        with keeper:
            for step in keeper.steps(fails_in):
                if step == fails_in:
                    before(keeper)
                    raise RuntimeError("Connection reset by peer")
                with keeper.commit():
                    pass

    with pytest.raises(RuntimeError, match="reset by peer"):
        train()
    return keeper


def restored() -> int:
    """The step from which the next generation goes on."""
    with kept(generation=1) as keeper:
        return keeper.step


def kept(generation: int) -> Keeper:
    os.environ["ELAUNCH_GENERATION"] = str(generation)
    model = nn.Linear(1, 1)
    options: dict[str, Any] = {"lose_at_most": 1, "per_rank": (), "log": lambda text: None}
    return Keeper(model, torch.optim.SGD(model.parameters()), hook_state=Feedback(), **options)


def versions(memory: Path) -> list[Version]:
    """The versions of the replicated state in memory, the oldest first."""
    headers = [
        header_of(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
        for path in memory.glob("*.state-?")
    ]
    return sorted(header.version for header in headers if header is not None)
