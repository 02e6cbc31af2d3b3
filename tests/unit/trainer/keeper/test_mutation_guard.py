"""Changes of the state outside of a commit: which are found, what they are called, and what the Keeper does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.keeper.mutation_guard import MutationGuard
from elaunch.trainer.state import Version
from elaunch.trainer.state.live_tensors import LiveTensors
from tests.unit.trainer.conftest import Fails

pytestmark = pytest.mark.usefixtures("memory")


class Parts:
    """A model, an optimizer with a state, an average of the model, and other tensors."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.average = AveragedModel(self.model)
        self.extra: dict[str, Any] = {"queue": torch.zeros(4), "deep": [{"count": 5}, (torch.ones(2),)]}
        self.backward()
        self.step()
        self.changes = MutationGuard(LiveTensors(self.model, [self.optimizer], [self.average, self.extra]))
        self.changes.note()

    def backward(self) -> None:
        self.model(torch.randn(8, 4)).sum().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.average.update_parameters(self.model)


def loaded(parts: Parts) -> None:
    parts.model.load_state_dict({name: value + 1 for name, value in parts.model.state_dict().items()})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda parts: nn.init.ones_(parts.model[0].weight), "`0.weight` changed"),
        (lambda parts: setattr(parts.model[2].bias, "data", torch.zeros(1)), "`2.bias` changed"),
        (
            lambda parts: parts.optimizer.state[parts.model[0].bias].update(exp_avg_sq=torch.zeros(8)),
            "`0.bias: exp_avg_sq of the optimizer` changed",
        ),
        (
            lambda parts: parts.average.update_parameters(parts.model),
            "`extra.0.module.0.weight` and 5 more changed",
        ),
        (lambda parts: parts.extra["deep"][1][0].add_(1), "`extra.0.deep.1.0` changed"),
        (
            lambda parts: parts.optimizer.state.clear(),
            "the state of an optimizer, or the number of tensors in `extra`, changed",
        ),
        (loaded, "`0.weight` and 5 more changed"),
    ],
    ids=["weight", "exchanged", "replaced", "averaged", "deep", "cleared", "loaded"],
)
def test_a_change_is_found_and_named(change: Callable[[Parts], object], name: str) -> None:
    parts = Parts()
    assert not parts.changes.found(12)

    change(parts)

    assert parts.changes.found(12).startswith(f"{name} outside keeper.commit() after step 12. ")
    parts.changes.forget()
    parts.step()
    parts.changes.note()
    assert not parts.changes.found(13)


def clipped(parts: Parts) -> None:
    parts.backward()
    nn.utils.clip_grad_norm_(parts.model.parameters(), 0.1)
    parts.optimizer.zero_grad()


def scaled(parts: Parts) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = parts.model(torch.randn(8, 4)).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(parts.optimizer)


@pytest.mark.parametrize(
    "act",
    [
        *(Parts.backward, clipped, scaled),
        lambda parts: parts.model.eval()(torch.randn(8, 4)),
        lambda parts: (parts.model.state_dict(), parts.optimizer.state_dict()),
        lambda parts: parts.model[0].requires_grad_(False),
        lambda parts: torch.compile(parts.model, backend="eager")(torch.randn(8, 4)).sum().backward(),
    ],
    ids=["backward", "clipped", "scaled", "evaluated", "saved", "frozen", "compiled"],
)
def test_what_a_loop_does_between_two_commits_is_no_change(act: Callable[[Parts], object]) -> None:
    parts = Parts()

    act(parts)

    assert not parts.changes.found(12)


def test_tensors_that_a_commit_replaces_are_not_kept_alive() -> None:
    parts = Parts()
    state = parts.optimizer.state[parts.model[0].weight]
    died: list[int] = []
    weakref.finalize(state["exp_avg"], died.append, 1)

    parts.changes.forget()
    state["exp_avg"] = torch.zeros(8, 4)

    assert died


class Job:
    """A training that changes its weights at some moments outside of the commit."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.logged: list[str] = []
        self.keeper = Keeper(
            self.model, self.optimizer, **{"lose_at_most": 1, "log": self.logged.append, "per_rank": (), **options}
        )

    def train(self, steps: int, *, changes_after: tuple[int, ...] = (), fails_in: int = 0) -> None:
        with self.keeper:
            for step in self.keeper.steps(steps):
                self.model(torch.ones(2, 4)).sum().backward()
                if step == fails_in:
                    raise RuntimeError("Connection reset by peer")
                with self.keeper.commit():
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if step in changes_after:
                    with torch.no_grad():
                        self.model.weight.add_(1)


SENTENCE = (
    "`weight` changed outside keeper.commit() after step 4. A failure before the next commit ends goes back to the "
    "previous copy; a checkpoint, a stop and the end keep this state as it is. Move that change into the commit"
)


def test_a_state_that_changed_outside_is_not_kept_after_a_failure_and_it_is_logged_once(fails: Fails) -> None:
    job = Job()
    fails(lambda: job.train(9, changes_after=(4,), fails_in=5))

    resumed = Job()
    with resumed.keeper:
        assert (resumed.keeper.step, resumed.keeper.repeated) == (3, 1)

    assert job.logged == [SENTENCE]


def test_a_program_that_changes_the_state_after_each_commit_is_stopped_before_it_loses_anything() -> None:
    with pytest.raises(
        RuntimeError, match=r"`weight` changed outside keeper\.commit\(\) after step 3.*never be a copy"
    ):
        Job().train(9, changes_after=tuple(range(9)))


def test_what_a_survivor_saves_does_not_count_if_the_state_changes_meanwhile(
    fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, save = Job(lose_at_most=100), Copies.save_replicated

    def changed_meanwhile(copies: Copies, version: Version) -> bool:
        is_kept = save(copies, version)
        if version.step == 4:
            with torch.no_grad():
                job.model.weight.add_(1)
        return is_kept

    monkeypatch.setattr(Copies, "save_replicated", changed_meanwhile)
    fails(lambda: job.train(9, fails_in=5))

    resumed = Job()
    with resumed.keeper:
        assert resumed.keeper.step == 1

    assert job.logged == [SENTENCE]
