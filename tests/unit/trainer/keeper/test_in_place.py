"""A restore puts `extra` into the objects that the program has, which may know them by names of its own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import put_into

pytestmark = pytest.mark.usefixtures("memory")


def one() -> Tensor:
    return torch.zeros(3)


FORMS: list[Callable[[Tensor], Any]] = [
    *(lambda ema: {"ema": ema}, lambda ema: {"ema": [ema, 1]}, lambda ema: {"a": OrderedDict(b=[{"c": (ema,)}])}),
    # Not in a dictionary.
    *(lambda ema: ema, lambda ema: [ema, torch.ones(2)], lambda ema: (ema, {"n": 0}), lambda ema: [{"ema": ema}]),
    # In two places.
    lambda ema: {"ema": ema, "shadow": [ema]},
]


@pytest.mark.parametrize(
    ("form", "where"),
    [*((form, "memory") for form in range(len(FORMS))), (0, "checkpoint"), (2, "checkpoint"), (7, "checkpoint")],
)
def test_a_tensor_that_the_program_updates_by_its_own_name_continues(
    form: int, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def trained(steps: int) -> tuple[float, Tensor]:
        model, ema = nn.Linear(2, 1), one()
        rate = torch.tensor(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        (group,) = optimizer.param_groups
        folder = {"checkpoints": tmp_path / "c"} if where == "checkpoint" else {}
        extra = FORMS[form](ema)
        with Keeper(model, optimizer, extra=extra, per_rank=(), log=lambda _: None, **folder) as keeper:
            for step in keeper.steps(steps):
                with keeper.commit():
                    ema += step
                    rate.mul_(0.5)
                    group["seen"] = step
        assert group is optimizer.param_groups[0]
        assert (group["seen"], group["lr"].item()) == (steps, rate.item())
        return rate.item(), ema

    trained(3)
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    if where == "checkpoint":
        monkeypatch.delenv("ELAUNCH_MEMORY")

    rate, ema = trained(5)
    assert ema.tolist() == [15.0] * 3
    assert rate == torch.tensor(0.1 / 32).item()


def test_the_models_own_tensors_in_extra_do_not_get_what_took_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(steps: int) -> tuple[Any, Any]:
        model = nn.Linear(2, 1)
        extra: dict[str, Any] = {"best": model.state_dict()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Keeper(model, optimizer, extra=extra, per_rank=(), log=lambda _: None) as keeper:
            for step in keeper.steps(steps):
                with keeper.commit(), torch.no_grad():
                    model.weight.fill_(step)
                    if step == 2:
                        extra["best"] = {name: value.clone() for name, value in model.state_dict().items()}
        return model.weight.tolist(), extra["best"]["weight"].tolist()

    trained(3)
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")

    assert trained(3) == ([[3.0, 3.0]], [[2.0, 2.0]])


def test_a_part_that_no_restore_could_put_back_is_refused() -> None:
    model = nn.Linear(2, 1)

    for extra in (5, ("best", one()), (one(), (1, 2))):
        with pytest.raises(TypeError, match=r"extra has .*, which a restore could not put back"):
            Keeper(model, torch.optim.SGD(model.parameters()), extra=extra)


def test_containers_and_tensors_stay_the_same_objects() -> None:
    tensor, numbers, names, counts = one(), [1, 2], {"a"}, Counter(a=1)
    there = {"t": tensor, "l": numbers, "s": names, "c": counts, "gone": 1}

    found = put_into(there, {"t": torch.ones(3), "l": [5, 6, 7], "s": {"b"}, "c": Counter(b=2), "new": (1, 2)})

    assert found is there
    assert (tensor.tolist(), numbers, names, counts) == ([1.0] * 3, [5, 6, 7], {"b"}, Counter(b=2))
    assert list(there) == ["t", "l", "s", "c", "new"]


def test_a_tensor_of_another_shape_or_type_stays_the_same_object() -> None:
    there = {"shape": one(), "type": one()}
    shape, kind = there["shape"], there["type"]

    put_into(there, {"shape": torch.ones(5), "type": torch.ones(3, dtype=torch.float64)})

    assert shape.tolist() == [1.0] * 5
    assert (kind.dtype, kind.tolist()) == (torch.float64, [1.0] * 3)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's and many a Lookahead: an Optimizer that never called `__init__`, around another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


def test_a_wrapper_of_an_optimizer_continues_with_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(steps: int) -> tuple[list[float], Any]:
        model = nn.Linear(2, 1).to(torch.bfloat16)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = Wrapper(inner)
        with Keeper(model, optimizer, per_rank=(), log=lambda _: None) as keeper:
            for step in keeper.steps(steps):
                model(torch.ones(1, 2).bfloat16()).sum().backward()
                with keeper.commit():
                    optimizer.step()
                    inner.state[model.weight]["mean"] = torch.full((2,), 0.1)
                    optimizer.param_groups[0]["lr"] = 0.5**step
                    model.zero_grad()
        return [group["lr"] for group in inner.param_groups], inner.state[model.weight]["mean"]

    trained(2)
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    rates, mean = trained(3)

    assert rates == [0.125]
    assert (mean.dtype, mean.tolist()) == (torch.float32, torch.full((2,), 0.1).tolist())
