"""Eight bits for each element of a gradient, with a scale for each tensor."""

from __future__ import annotations

import pytest
import torch

from elaunch.trainer.ddp.quantised import HEADER_BYTES, LEVELS, add_decoded, encode


def tensors(*parts: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    return torch.cat([part.flatten() for part in parts]), [part.numel() for part in parts]


def decode(message: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    found = torch.zeros(sum(sizes))
    add_decoded(found, message, sizes)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_comes_back_within_half_a_level_of_its_own_tensor(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    small, large = torch.randn(1001) * 1e-6, torch.randn(7, 13) * 1e3
    gradient, sizes = tensors(small, large)
    gradient = gradient.to(dtype)

    message = encode(gradient, sizes)
    found = decode(message, sizes)

    assert message.dtype == torch.uint8
    assert message.numel() == gradient.numel() + 2 * HEADER_BYTES
    for part, its in zip(gradient.float().split(sizes), found.split(sizes), strict=True):
        half = (part.max() - part.min()) / LEVELS / 2
        assert (part - its).abs().max() <= half * 1.001


def test_a_tensor_of_equal_elements_is_exact() -> None:
    gradient, sizes = tensors(torch.zeros(5), torch.full((3,), -2.5), torch.tensor([7.0]))

    assert torch.equal(decode(encode(gradient, sizes), sizes), gradient)


def test_its_lowest_value_is_exact_and_its_highest_almost() -> None:
    gradient, sizes = tensors(torch.tensor([-1.0, 0.3, 3.0]))

    found = decode(encode(gradient, sizes), sizes)

    assert found[0] == -1.0
    assert found[2] == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_lost_and_spoils_its_own_tensor_only(bad: float) -> None:
    gradient, sizes = tensors(torch.tensor([1.0, bad, 2.0]), torch.tensor([1.0, 2.0]))

    found = decode(encode(gradient, sizes), sizes)

    assert not found[:3].isfinite().all()
    assert torch.allclose(found[3:], gradient[3:])
