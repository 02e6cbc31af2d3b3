"""PowerSGD in a group of one: what it leaves out comes later, zeros stay zeros, and its state can be loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elaunch.trainer.ddp.hooks import hook_state, register, wrap
from elaunch.trainer.ddp.powersgd import PowerSgd, orthogonal, parts_of

WIDTH = 64
LAYERS = 3
# Each layer in a bucket of its own.
BUCKET_MB = WIDTH * (WIDTH + 1) * 4 / 2**20


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


class Training:
    """Passes of a model that does not change, so each has the same gradients."""

    def __init__(self, rank: int, *, samples: int = 8) -> None:
        torch.manual_seed(0)
        self._inputs = torch.randn(samples, WIDTH)
        self.model = self._wrapped(rank)
        # Until the buckets stay.
        self.gradients()
        self.exact = self.gradients()

    def _wrapped(self, rank: int) -> Any:
        network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        model = wrap(network, torch.device("cpu"), bucket_mb=BUCKET_MB)
        register(model, "powersgd", powersgd_rank=rank, powersgd_start=2)
        return model

    def gradients(self, scale: float = 1.0) -> Tensor:
        self.model.zero_grad()
        (scale * self.model(self._inputs).square().mean()).backward()
        return torch.cat([each.grad.flatten() for each in self.model.parameters()])

    def error(self, passes: int) -> float:
        """The relative error of the mean of so many passes."""
        mean = torch.stack([self.gradients() for _ in range(passes)]).mean(0)
        return float((mean - self.exact).norm() / self.exact.norm())


def test_what_one_pass_leaves_out_comes_in_later_ones() -> None:
    training = Training(rank=1)

    one, many = training.error(1), training.error(60)

    assert 0.1 < one < 1.0
    # Without error feedback it would hardly change.
    assert many < 0.6 * one


def test_warm_factors_find_matrices_of_a_low_rank_exactly() -> None:
    training = Training(rank=4, samples=4)

    training.gradients()

    assert training.error(1) < 1e-5


def test_gradients_that_are_0_stay_0_and_later_ones_are_seen() -> None:
    training = Training(rank=1)

    assert all(torch.equal(training.gradients(scale=0.0), torch.zeros_like(training.exact)) for _ in range(3))

    training.gradients()
    assert training.error(60) < 0.6


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    first, second = Training(rank=2), Training(rank=2)
    for _ in range(3):
        first.gradients()

    hook_state(second.model).load_state_dict(copy.deepcopy(hook_state(first.model).state_dict()))

    assert [first.gradients().tolist() for _ in range(3)] == [second.gradients().tolist() for _ in range(3)]


def test_a_state_of_other_buckets_begins_anew() -> None:
    first, second = Training(rank=1), Training(rank=1)
    first.gradients()
    other = copy.deepcopy(hook_state(first.model).state_dict())
    other["errors"].pop()

    hook_state(second.model).load_state_dict(other)

    assert second.error(60) < 0.6


class Bucket:
    """One of two buckets of a pass, of a matrix each."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self._number, self._matrix = number, torch.randn(32, 1) @ torch.randn(1, 32)

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._number == 1

    def buffer(self) -> Tensor:
        return self._matrix.view(-1)

    def gradients(self) -> list[Tensor]:
        return [self._matrix]


def test_a_pass_that_failed_halfway_leaves_nothing_behind() -> None:
    state: Any = PowerSgd(dist.group.WORLD, 1, 0)  # type: ignore[arg-type]
    failed = state.exchange(Bucket(0))

    for _ in range(2):
        futures = [state.exchange(Bucket(number)) for number in range(2)]

    assert not failed.done()
    for number, future in enumerate(futures):
        torch.testing.assert_close(future.value(), Bucket(number).buffer())


def test_columns_are_orthonormal_and_span_the_same() -> None:
    torch.manual_seed(0)
    # Nearly parallel, tiny, and one column of zeros.
    matrices = torch.randn(5, 40, 1) * torch.tensor([1.0, 1.0, 1e-3]) + 1e-4 * torch.randn(5, 40, 3)
    matrices[1] *= 1e-25
    matrices[2, :, 1] = 0

    found = orthogonal(matrices)

    torch.testing.assert_close(found.mT @ found, torch.eye(3).expand(5, 3, 3), rtol=0, atol=1e-5)
    scaled = matrices / matrices.abs().amax(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(found @ (found.mT @ scaled), scaled, rtol=0, atol=1e-5)


def test_each_element_has_one_place() -> None:
    for shapes in ([[64, 64], [64], [3, 5, 40, 2], [], [0, 4]], [[7]], [[1]], [[1009, 1013]], [[12, 300]]):
        parts = parts_of([torch.Size(shape) for shape in shapes], 2)

        places = [(offset, rows * columns) for offset, (rows, columns) in parts.matrices] + [*parts.whole]
        covered = sorted(place for offset, size in places for place in range(offset, offset + size))
        assert covered == list(range(sum(torch.Size(shape).numel() for shape in shapes)))


def test_a_matrix_that_saves_little_is_sent_whole() -> None:
    assert parts_of([torch.Size([8, 8]), torch.Size([9, 9])], 2).matrices == ((64, (9, 9)),)
