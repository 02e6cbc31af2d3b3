"""Copies of each step of a state in parts, in one process: their content, how often they are made, what is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elaunch.trainer.keeper.keeper import Keeper
from tests.unit.trainer.conftest import Fails

pytestmark = pytest.mark.usefixtures("memory", "group")


class Counting(torch.optim.SGD):
    """An optimizer that keeps a plain number for each parameter."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
        return found


class Job:
    """A training of FSDP2 that is built again for each generation."""

    def __init__(self, first: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), mesh=init_device_mesh("cpu", (1,)))
        self.optimizer = first(self.model.parameters(), lr=0.1, weight_decay=0.1)
        # Each rate follows from the one before.
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.logged: list[str] = []
        # The loaders of other tests may still be there.
        options = {"lose_at_most": 0, "log": self.logged.append, "per_rank": (), **options}
        self.keeper = Keeper(self.model, self.optimizer, scheduler=self.scheduler, **options)

    def train(self, steps: int, fails_in: int = 0, evaluated: int = 0) -> list[Any]:
        """All that the state has in the end."""
        with self.keeper:
            for step in self.keeper.steps(steps):
                self.model(torch.randn(8, 4)).pow(2).mean().backward()
                if step == fails_in:
                    raise RuntimeError("Connection reset by peer")
                with self.keeper.commit():
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if step == evaluated:
                    with torch.no_grad():
                        self.model(torch.zeros(1, 4))
                    # As the Keeper takes one now and then.
                    self.keeper._state.snapshot()
        parameters = [parameter.to_local().tolist() for parameter in self.model.parameters()]  # type: ignore[operator]
        return [parameters, self.optimizer.param_groups[0]["lr"]]


def test_a_failed_step_goes_back_to_the_step_before_with_its_learning_rate(
    fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("ELAUNCH_MEMORY")
        calm = Job().train(10)
    fails(lambda: Job().train(10, fails_in=7))

    resumed = Job()

    assert resumed.train(10) == calm
    assert resumed.logged == ["restored step 6 from memory (of generation 0, in parts); 0 steps are repeated"]


def test_a_failure_after_the_first_step_does_not_repeat_it(fails: Fails) -> None:
    """A rank that dies there has left its part behind before any rank has completed the step."""

    def fail(job: Job) -> None:
        with job.keeper:
            for _ in job.keeper.steps(10):
                job.model(torch.randn(8, 4)).pow(2).mean().backward()
                with job.keeper.commit():
                    job.optimizer.step()
                raise RuntimeError("Connection reset by peer")

    fails(lambda: fail(Job()))

    resumed = Job()
    resumed.train(2)

    assert resumed.logged == ["restored step 1 from memory (of generation 0, in parts); 0 steps are repeated"]


def test_a_state_with_numbers_that_change_with_its_tensors_has_snapshots_only_and_it_is_logged(fails: Fails) -> None:
    job = Job(Counting, lose_at_most=4)
    fails(lambda: job.train(10, fails_in=7))

    resumed = Job(Counting)

    assert job.logged == [
        "the state can be copied at snapshots only: its tensors are recreated each time, or other values change with "
        "them; a failure goes back to the last snapshot"
    ]
    with resumed.keeper:
        assert resumed.keeper.step == 5


def test_a_snapshot_after_an_evaluation_is_followed_by_copies(fails: Fails) -> None:
    """FSDP2 leaves the root's parameters whole after a forward pass without a backward pass."""
    job = Job(lose_at_most=2)
    fails(lambda: job.train(10, fails_in=9, evaluated=3))

    resumed = Job()

    assert job.logged == []
    with resumed.keeper:
        assert resumed.keeper.step == 8


def test_copies_that_would_cost_more_than_1_percent_are_made_seldom_and_it_is_logged_once() -> None:
    job = Job(lose_at_most=None)

    # A step takes less than a copy.
    job.train(30)

    (logged,) = job.logged
    assert logged.startswith("a copy of what rank 0 alone has takes ")
    assert "Keeper(…, lose_at_most=0) copies each step" in logged
