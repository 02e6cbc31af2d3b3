"""Buffers that are made, replaced, resized or removed in mid-training, and those that are not persistent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from elaunch.trainer.keeper import entry_checks
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.keeper.per_rank_state import PerRankState
from elaunch.trainer.memory.node_memory import Records
from elaunch.trainer.state import Version
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import cloned
from tests.unit.trainer.conftest import trained

pytestmark = pytest.mark.usefixtures("memory")


def is_none(model: Any, mean: Tensor) -> None:
    model.center = mean if model.center is None else model.center * 0.9 + mean


def comes_late(model: Any, mean: Tensor, persistent: bool = True) -> None:
    if not hasattr(model, "center"):
        model.register_buffer("center", mean.clone(), persistent=persistent)
    model.center.mul_(0.9).add_(mean)


def grows(model: Any, mean: Tensor) -> None:
    model.center = torch.cat([model.center, mean[None]])[-3:]


def changes_its_type(model: Any, mean: Tensor) -> None:
    model.center = model.center.double() * 0.9 + mean


def is_replaced(model: Any, mean: Tensor) -> None:
    model.center = model.center * 0.9 + mean


def changes_in_place(model: Any, mean: Tensor) -> None:
    model.center.mul_(0.9).add_(mean)


def goes_away(model: Any, mean: Tensor) -> None:
    model.center = None if model.center is not None else mean


def is_deleted(model: Any, mean: Tensor) -> None:
    if hasattr(model, "center"):
        del model.center


_NONE: Callable[[], Tensor | None] = lambda: None  # noqa: E731
FORMS = [
    (is_none, _NONE, True),
    (is_none, _NONE, False),
    (comes_late, ..., True),
    (partial(comes_late, persistent=False), ..., True),
    (grows, lambda: torch.zeros(0, 4), True),
    (changes_its_type, lambda: torch.zeros(4), True),
    (is_replaced, lambda: torch.zeros(4), False),
    (changes_in_place, lambda: torch.zeros(4), False),
    (goes_away, lambda: torch.zeros(4), True),
    (is_deleted, lambda: torch.zeros(4), True),
    (goes_away, lambda: torch.zeros(4), False),
]


class Centred(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], None], made: Any, persistent: bool) -> None:
        super().__init__()
        self.layer, self._change = nn.Linear(4, 1), change
        if made is not ...:
            self.register_buffer("center", made(), persistent=persistent)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self._change(self, inputs.mean(0))
        center: Any = getattr(self, "center", None)
        shift = 0 if center is None else center.float().sum()
        found: Tensor = self.layer(inputs * self.table - shift)
        return found


def train(form: tuple[Any, Any, bool], steps: int, *, warm: bool = False, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Centred(*form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def warm_up() -> None:
        model(torch.ones(2, 4)).sum().backward()

    loss = lambda: model(torch.randn(2, 4)).pow(2).sum()  # noqa: E731
    trained(model, optimizer, steps, loss, warm_up=warm_up if warm else None, **options)
    center: Any = getattr(model, "center", None)
    return {"center": center, "table": model.table, **dict(model.named_parameters())}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value is None) == (other[name] is None)
        if value is not None:
            assert (value.dtype, value.tolist()) == (other[name].dtype, other[name].tolist()), name


@pytest.mark.parametrize(
    ("form", "where"), [*((form, "memory") for form in FORMS), *((form, "checkpoint") for form in FORMS[::2])]
)
def test_a_buffer_of_any_form_continues_where_it_was(
    form: tuple[Any, Any, bool], where: str, monkeypatch: pytest.MonkeyPatch, memory: Path, tmp_path: Path
) -> None:
    folder = {"checkpoints": tmp_path / "c"} if where == "checkpoint" else {}
    with monkeypatch.context() as patch:
        patch.delenv("ELAUNCH_MEMORY")
        calm = train(form, 8, warm=True)
        if folder:
            train(form, 5, warm=True, **folder)
    if not folder:
        train(form, 5, warm=True)
    else:
        monkeypatch.delenv("ELAUNCH_MEMORY")
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")

    assert_same(train(form, 8, warm=True, **folder), calm)


def test_a_checkpoint_with_a_buffer_of_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train((is_replaced, lambda: torch.zeros(4), True), 2, checkpoints=tmp_path / "c")
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")

    def restore(name: str, made: Any) -> None:
        model = Centred(is_replaced, made, True)
        Keeper(model, torch.optim.SGD(model.parameters()), checkpoints=tmp_path / "c", name=name).restore()

    with pytest.raises(ValueError, match=r"holds center of shape \(4,\), and in the model it has shape \(5,\)"):
        restore("another", lambda: torch.zeros(5))
    with pytest.raises(ValueError, match=r"the checkpoint holds center .* there is no such buffer"):
        restore("a-third", ...)


def test_a_checkpoint_is_better_than_a_newer_state_whose_buffers_are_lost(
    monkeypatch: pytest.MonkeyPatch, memory: Path, tmp_path: Path
) -> None:
    form, checkpoints = (changes_in_place, lambda: torch.zeros(4), True), {"checkpoints": tmp_path / "c"}
    with monkeypatch.context() as patch:
        patch.delenv("ELAUNCH_MEMORY")
        train(form, 3, **checkpoints)
        calm = train(form, 8)
    entry_checks._held.cache_clear()
    train(form, 5, **checkpoints)
    entry_checks._held.cache_clear()
    for path in (tmp_path / "c").glob("*-00000005.*"):
        shutil.rmtree(path)
    for path in memory.glob("training.rank-*"):
        path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    logged: list[str] = []

    assert_same(train(form, 8, **checkpoints, log=logged.append), calm)
    assert len(logged) == 1
    assert logged[0].startswith(f"restored step 3 from the checkpoint in {tmp_path / 'c'}; 2 steps are repeated")


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_that_gradient_checkpointing_changes_in_the_backward_pass_are_those_of_the_step(
    reentrant: bool,
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.inner = nn.Sequential(nn.Linear(2, 2), self.norm)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Checkpointed(), torch.randn(8, 2, requires_grad=True)
    with Keeper(model, torch.optim.SGD(model.parameters()), per_rank=()) as keeper:
        for step in keeper.steps(3):
            model(x).sum().backward()
            kept = keeper._copies._records.find(Version(0, step))["buffers"]  # type: ignore[union-attr]
            assert int(kept["norm.num_batches_tracked"]) == 2 * step
            assert torch.equal(kept["norm.running_mean"], model.norm.running_mean)
            with keeper.commit():
                model.zero_grad()
            assert not keeper._training.of_commit


def test_what_a_commit_changes_in_buffers_comes_from_a_rank_that_came_to_its_end(tmp_path: Path) -> None:
    def made() -> tuple[AveragedModel, Training]:
        average = AveragedModel(nn.Linear(2, 2))
        return average, Training(average, torch.optim.SGD(average.parameters(), lr=0.1))

    average, training = made()
    records, step = Records(tmp_path, "n", b"layout".ljust(16), 0), Version(0, 1)
    own = PerRankState(training, records, print)
    own.store(step, is_begun=True)
    of_the_dead = cloned(records.find(step))
    own.store(step, is_begun=True)
    average.n_averaged += 1
    own.store(step, unless_same=True)
    survivors = cloned(training.replicated())
    average.n_averaged += 1  # The next step has begun.

    again, restored = made()
    restored.load_replicated(survivors)
    restored.load_own(of_the_dead)

    assert again.n_averaged == 1
    own.store(Version(0, 2), is_begun=True)
    own.store(Version(0, 2), unless_same=True)
    assert not training.of_commit


def test_a_training_that_has_ended_leaves_the_same_random_numbers_after_each_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after = []
    for generation in range(3):
        monkeypatch.setenv("ELAUNCH_GENERATION", str(generation))
        train((changes_in_place, lambda: torch.zeros(4), False), 4)
        after.append(torch.rand(1).item())

    assert after[1:] == after[:1] * 2
