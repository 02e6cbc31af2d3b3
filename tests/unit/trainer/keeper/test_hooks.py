"""When a rank's own state is stored, and gradients that a commit leaves."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaunch.trainer import Keeper
from elaunch.trainer.keeper.hooks import LeftGradients, hook_backward


@dataclass
class Output:
    scores: Tensor


class Model(nn.Module):
    """Returns its scores in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = nn.Linear(2, 2), form

    def forward(self, x: Tensor) -> Any:
        scores = self.inner(x)
        return {"scores": scores} if self.form == "dict" else Output(scores) if self.form == "dataclass" else scores


@pytest.mark.parametrize("form", ["tensor", "dict", "dataclass", "past the wrapper"])
def test_the_own_state_is_stored_after_the_loss_is_computed_and_before_a_gradient_is_there(form: str) -> None:
    model, seen = Model(form), list[tuple[bool, float]]()
    drawn = torch.zeros(())
    remove = hook_backward(model, lambda: seen.append((model.inner.weight.grad is None, drawn.item())))
    x = torch.ones(1, 2)

    out = model.inner(x) if form == "past the wrapper" else model(x)
    scores = out["scores"] if isinstance(out, dict) else out.scores if isinstance(out, Output) else out
    assert not seen
    drawn.fill_(1)
    scores.sum().backward()

    assert seen == [(True, 1.0)]
    remove()
    model.inner(x).sum().backward()
    assert len(seen) == 1


def test_a_pass_without_a_gradient_stores_immediately() -> None:
    model, seen = Model("tensor"), list[int]()
    hook_backward(model, lambda: seen.append(1))

    with torch.no_grad():
        model(torch.ones(1, 2))

    assert seen == [1]


def train(how: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Keeper(model, optimizer, per_rank=()) as keeper:
        for step in keeper.steps(12):
            if how == "before the pass":
                optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            with keeper.commit():
                if how != "every fourth step" or step % 4 == 0:
                    optimizer.step()
                    if how in ("zeros", "every fourth step"):
                        optimizer.zero_grad(set_to_none=how != "zeros")


@pytest.mark.parametrize("how", ["before the pass", "zeros", "every fourth step", "never"])
def test_a_gradient_that_a_commit_leaves_is_refused_by_the_next_one_unless_it_is_zeroed(memory: Path, how: str) -> None:
    refused = pytest.raises(RuntimeError, match=r"gradients of `bias` and 1 more .* after the commit of step 1, and")

    with refused if how in ("every fourth step", "never") else nullcontext():
        train(how)


def test_accumulation_that_begins_late_is_refused_too() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = LeftGradients(model, [optimizer])
    logged = []

    for step in range(1, 25):
        model(torch.ones(2)).sum().backward()
        logged.append(found.commit_begins(step))
        if step < 20:
            optimizer.zero_grad()
        found.commit_ended()

    assert not any(logged[:20])
    assert "still there after the commit of step 20" in logged[20]
