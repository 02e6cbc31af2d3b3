"""A DDP wrapper gets other buckets and hooks in place: it stays the same object, and its gradients the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.tuning.tune import apply, obstacle

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# A layer's weight: 256 x 256 float32 are 0.25 MiB.
WIDTH, LAYERS = 256, 8
INPUTS = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of one rank, whose threads do not wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers), **options)


def gradients(model: DistributedDataParallel, passes: int = 2) -> list[Tensor]:
    """Those of the last pass. DDP has its real buckets from the second pass on."""
    for _ in range(passes):
        model.zero_grad()
        model(INPUTS).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def bucket_count(model: DistributedDataParallel) -> int:
    gradients(model)
    return len(model.reducer._get_zeros_like_grad_buckets())  # type: ignore[attr-defined]


def test_it_has_the_buckets_that_it_was_given_and_the_same_gradients() -> None:
    model = wrapped()
    before = gradients(model)
    assert bucket_count(model) == 2

    for size, count in ((0.5, 4), (0.25, 8), (3, 1), (None, 2)):
        apply(model, size)
        assert bucket_count(model) == count, size
        assert all(map(torch.equal, gradients(model), before)), size


def test_a_hook_of_the_programs_own_is_called_once_for_each_bucket_and_stays() -> None:
    model = wrapped()
    sizes: list[int] = []

    # DDP compares annotations with classes, and here they are strings.
    def own(state, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, own)
    assert not obstacle(model, model)
    for size in (0.5, 3):
        apply(model, size)
    gradients(model)
    sizes.clear()
    gradients(model, passes=1)

    assert sizes == [WIDTH * WIDTH * LAYERS]


def test_what_the_program_asked_of_ddp_stays() -> None:
    model = wrapped(
        static_graph=True, find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    apply(model, 1)
    assert model.static_graph
    assert model.find_unused_parameters
    assert not model.broadcast_buffers
    assert model.gradient_as_bucket_view
    gradients(model, passes=3)

    with model.no_sync():
        apply(model, 2)
        assert not model.require_backward_grad_sync


def test_what_cannot_be_rebuilt_is_said() -> None:
    assert obstacle(plain := wrapped(), plain) == ""
    stateful = wrapped()
    stateful.register_comm_hook(object(), lambda state, bucket: None)  # type: ignore[arg-type, return-value]
    assert "hook has a state" in obstacle(stateful, stateful)
    built_in = wrapped()
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert "built-in hook" in obstacle(built_in, built_in)
    given = wrapped(bucket_cap_mb=7)
    assert "the program has chosen their size" in obstacle(given, given)
    compiled = wrapped()
    compiled.compile()
    assert "compiled as a whole" in obstacle(compiled, compiled)
