"""Types of tensors in a state of which each rank has a part: kept bit for bit, or refused at entry."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from elaunch.trainer import Keeper
from tests.unit.trainer.conftest import trained

pytestmark = pytest.mark.usefixtures("group", "memory")


class Master(torch.optim.Optimizer):
    """SGD with float32 momentum and master weights, whatever the type of the parameters. Step 2 makes a value more."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state |= {"master": parameter.detach().clone().float(), "mean": parameter.grad.float() * 0}
                    elif "late" not in state:
                        state["late"] = parameter.grad.float()
                    state["mean"].mul_(0.9).add_(parameter.grad.float())
                    state["master"].sub_(state["mean"], alpha=group["lr"])
                    parameter.copy_(state["master"])


@pytest.mark.parametrize("where", ["memory", "checkpoint"])
@pytest.mark.parametrize("plan", ["fsdp2", "zero", "two"])
def test_float32_moments_and_master_weights_of_bfloat16_parameters_come_back_as_they_were(
    plan: str, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def moments() -> dict[str, Any]:
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)).to(torch.bfloat16)
        optimizers: list[Any]
        if plan == "zero":
            optimizers = [ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Master)]
        else:
            model = fully_shard(model) if plan == "fsdp2" else model
            optimizers = [Master(one.parameters()) for one in model]
        folder: dict[str, Any] = {"checkpoints": tmp_path / "c"} if where == "checkpoint" else {}
        trained(model, optimizers, 3, lambda: model(torch.randn(4, 5).bfloat16()).pow(2).sum(), **folder)
        inner = [getattr(one, "optim", one) for one in optimizers]
        return {
            f"{number}.{key} {type(value).__name__}": getattr(value, "_local_tensor", value)
            for one in inner
            for number, state in enumerate(one.state.values())
            for key, value in state.items()
        }

    kept = moments()
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    if where == "checkpoint":
        monkeypatch.delenv("ELAUNCH_MEMORY")
    back = moments()

    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert {name: value.dtype for name, value in back.items()} == dict.fromkeys(kept, torch.float32)
    assert all(torch.equal(back[name], value) for name, value in kept.items())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_gradient_that_a_commit_leaves_is_refused_with_fsdp_too(leaves: bool) -> None:
    model: Any = fully_shard(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = pytest.raises(RuntimeError, match="`weight` and 1 more were still there after the commit of step 1")
    keeper = Keeper(model, optimizer, per_rank=(), log=lambda _: None)

    with refused if leaves else nullcontext(), keeper:
        for _ in keeper.steps(3):
            with torch.no_grad():
                model(torch.ones(4, 5))
            loss = model(torch.ones(4, 5)).sum()
            if not leaves:
                optimizer.zero_grad()
            loss.backward()
            with keeper.commit():
                optimizer.step()


class Unwilling:
    """An object whose state cannot be loaded while `fails`."""

    fails = False

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise RuntimeError("not today")


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_restore_that_fails_deletes_nothing_that_is_good(in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []

    def train(steps: int) -> None:
        torch.manual_seed(3)
        layer: Any = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        model = fully_shard(layer) if in_parts else layer
        loss = lambda: model(torch.randn(4, 5)).pow(2).sum()  # noqa: E731
        trained(model, torch.optim.AdamW(model.parameters()), steps, loss, extra=Unwilling(), log=logged.append)

    train(3)
    monkeypatch.setattr(Unwilling, "fails", True)
    for generation in ("1", "2"):
        monkeypatch.setenv("ELAUNCH_GENERATION", generation)
        with pytest.raises(RuntimeError, match="not today"):
            train(5)
    monkeypatch.setattr(Unwilling, "fails", False)
    monkeypatch.setenv("ELAUNCH_GENERATION", "3")
    train(5)

    assert logged[-1].startswith("restored step 3 from memory (of generation 0")
