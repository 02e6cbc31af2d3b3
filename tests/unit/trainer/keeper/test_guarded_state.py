"""Which commits copy what this rank alone has of their step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.trainer.keeper.guarded_state import GuardedState
from elaunch.trainer.keeper.hooks import LeftGradients
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.version import Version


def copied(steps: int, *, each: bool) -> list[int]:
    """The steps of which there are copies, where the ranks have agreed on one of the next step."""
    model = nn.Linear(1, 1)
    copies: list[int] = []

    def before_commit(version: Version) -> bool:
        copies.append(version.step)
        return True

    def nothing(*args: object, **options: object) -> None:
        pass

    of_steps = SimpleNamespace(before_commit=before_commit, after_commit=lambda version: True)
    gpu = SimpleNamespace(before_commit=nothing, after_commit=nothing)
    all_copies: Any = SimpleNamespace(
        steps=of_steps,
        gpu=gpu,
        put_down=nothing,
        own=SimpleNamespace(put_down_changed=nothing),
        done=nothing,
        is_durable=False,
        lacks_base=False,
        copies_in_commit=False,
    )
    state = GuardedState(Training(model, torch.optim.SGD(model.parameters())), 0)
    state.restored(all_copies, Version(0, 0), nothing, nothing)
    state.copies_next, state.copies_each = True, each
    for _ in range(steps):
        state.begin()
        state.end()
    return copies


@pytest.mark.parametrize(("each", "found"), [(False, [1]), (True, [1, 2, 3])])
def test_the_agreed_copy_is_of_the_next_step_alone_unless_all_ranks_copy_each(each: bool, found: list[int]) -> None:
    assert copied(3, each=each) == found


def test_accumulation_that_begins_late_is_refused_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = LeftGradients(model, [optimizer])
    said = []

    for step in range(1, 25):
        model(torch.ones(2)).sum().backward()
        said.append(found.commit_begins(step))
        if step < 20:
            optimizer.zero_grad()
        found.commit_ended()

    assert not any(said[:20])
    assert "still there after the commit of step 20" in said[20]
