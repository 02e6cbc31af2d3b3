"""torchao's tensors, which are made of other tensors, under the Keeper: refused by name, or kept to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaunch.trainer import Keeper, link

pytestmark = pytest.mark.slow
torchao = pytest.importorskip("torchao", reason="torchao is not installed; `make integrations` installs it")


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("ELAUNCH_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setenv("ELAUNCH_GENERATION", "0")
    monkeypatch.delenv("ELAUNCH_LINK", raising=False)
    link._open_link.cache_clear()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def entered(model: nn.Module, optimizer: Any) -> None:
    with Keeper(model, optimizer, per_rank=()):
        pytest.fail("it was entered")


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_quantized_weights_are_refused_by_name_at_entry(config: str) -> None:
    from torchao import quantization

    model = network().to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model[0].weight) not in (Tensor, nn.Parameter)

    with pytest.raises(TypeError, match=r"^`0\.weight` cannot be kept: a torchao\..* is made of"):
        entered(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_the_state_of_a_low_bit_optimizer_is_refused_by_name_at_entry(name: str) -> None:
    from torchao import optim

    model = network()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.01)
    step(model, optimizer, 1)

    with pytest.raises(TypeError, match=r"^`0\.weight: exp_avg of the optimizer` cannot be kept: a torchao\."):
        entered(model, optimizer)


def test_float8_training_has_plain_weights_which_are_kept_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import convert_to_float8_training

    def trained(steps: int) -> tuple[Any, int, list[Tensor]]:
        model = convert_to_float8_training(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with Keeper(model, optimizer, per_rank=(), lose_at_most=1) as keeper:
            began = keeper.step
            for number in keeper.steps(steps):
                with keeper.commit():
                    # The matrix product in float8 needs a GPU.
                    for parameter in model.parameters():
                        seed = torch.Generator().manual_seed(number)
                        parameter.grad = torch.randn(parameter.shape, generator=seed)
                    optimizer.step()
        moments = [value for its in optimizer.state.values() for value in its.values()]
        return model, began, [*model.parameters(), *moments]

    model, _, before = trained(3)
    assert type(model[0]).__name__ == "Float8Linear"
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")

    _, began, after = trained(3)

    assert began == 3
    assert all(map(torch.equal, before, after))
