"""A module in DDP with its buckets and its hook, in a group of one: the mean of all gradients is the own one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elaunch.trainer.ddp.hooks import hook_state, register, wrap
from elaunch.trainer.ddp.powersgd import PowerSgd

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def gradients(model: nn.Module, steps: int = 4) -> torch.Tensor:
    for _ in range(steps):
        model.zero_grad()
        model(torch.linspace(-1, 1, 64).repeat(2, 1)).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(("hook", "tolerance"), [(None, 0.0), ("fp16", 1e-3), ("bf16", 1e-2), ("powersgd", 1e-5)])
def test_each_hook_gives_the_gradients_within_its_precision(hook: str | None, tolerance: float) -> None:
    # Both samples are equal, so each gradient is a matrix of rank 1.
    exact = gradients(network())
    model = wrap(network(), CPU, bucket_mb=0.02)
    if hook is not None:
        register(model, hook, powersgd_start=2)

    found = gradients(model)

    assert float((found - exact).norm() / exact.norm()) <= tolerance
    assert torch.equal(found, exact) == (hook is None)
    assert isinstance(hook_state(model), PowerSgd) == (hook == "powersgd")
    assert hook_state(nn.Linear(1, 1)) is None


def test_the_sizes_of_buckets_are_those_that_were_asked_for() -> None:
    def sizes(**options: Any) -> list[int]:
        """Bytes of each bucket after DDP has made them again. A layer has 16,640."""
        model = wrap(network(), CPU, **options)
        gradients(model, 2)
        return [4 * bucket.buffer().numel() for bucket in model.reducer._get_zeros_like_grad_buckets()]  # type: ignore[attr-defined]

    assert sizes() == [3 * 16_640]
    assert sizes(bucket_mb=16_640 / 2**20) == [16_640] * 3
