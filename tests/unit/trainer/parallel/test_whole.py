"""DDP with each communication hook, in a group of one: the mean of all gradients is the own one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from elaunch.trainer.parallel import whole
from elaunch.trainer.parallel.whole import hook_state, in_ddp

CPU = torch.device("cpu")
pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.filterwarnings("ignore::UserWarning")]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def gradients(model: nn.Module, steps: int = 4, scale: float = 1.0) -> torch.Tensor:
    for _ in range(steps):
        model.zero_grad()
        (scale * model(torch.linspace(-1, 1, 64).repeat(2, 1)).square().mean()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(("hook", "tolerance"), [(None, 0.0), ("fp16", 1e-3), ("bf16", 1e-2), ("powersgd", 1e-5)])
def test_each_hook_gives_the_gradients_within_its_precision(
    monkeypatch: pytest.MonkeyPatch, hook: str | None, tolerance: float
) -> None:
    monkeypatch.setattr(whole, "POWERSGD_START", 2)
    # Both samples are equal, so each gradient is a matrix of rank 1.
    exact = gradients(network())
    model = in_ddp(network(), CPU, hook=hook)

    found = gradients(model)

    assert float((found - exact).norm() / exact.norm()) <= tolerance
    assert torch.equal(found, exact) == (hook is None)
    assert isinstance(hook_state(model), PowerSGDState) == (hook == "powersgd")
    assert hook_state(nn.Linear(1, 1)) is None


def test_powersgd_has_one_bucket_and_gradients_of_0_are_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "POWERSGD_START", 2)
    model = in_ddp(network(), CPU, hook="powersgd")
    gradients(model)

    assert not gradients(model, 2, scale=0.0).isnan().any()
    assert len(model.reducer._get_zeros_like_grad_buckets()) == 1  # type: ignore[attr-defined]
