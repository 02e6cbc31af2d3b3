"""How many passes DDP needs until its buckets are those of all later steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

# This registers the backend that is called fake.
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.state.model_state import passes_to_final_sums

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Crosswise(nn.Module):
    """Uses its layers in the order in which they are registered in, so that backward meets them the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs)
        return inputs


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Rank 0 of three, of which there is no other. So they make no collective."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=3)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Crosswise(), bucket_cap_mb=0.03, **options)


def buckets_after(passes: int, **options: Any) -> list[list[int]]:
    """The sizes of the tensors in each bucket, as the forward pass after so many passes finds them."""
    model = wrapped(process_group=dist.new_group([0], backend="gloo"), **options)
    for _ in range(passes):
        model(torch.ones(2, 64)).sum().backward()
    model(torch.ones(2, 64))
    order = {parameter.data_ptr(): number for number, parameter in enumerate(model.parameters())}
    return [
        [order[tensor.data_ptr()] for tensor in bucket.parameters()]
        for bucket in model.reducer._get_zeros_like_grad_buckets()  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_after_so_many_passes_and_no_fewer_the_buckets_stay_as_they_are(options: dict[str, Any]) -> None:
    passes = passes_to_final_sums([wrapped(**options)], 3)

    final = buckets_after(4, **options)
    assert buckets_after(passes, **options) == final
    assert all(buckets_after(fewer, **options) != final for fewer in range(passes))


def test_the_model_that_needs_most_decides_wherever_its_wrapper_is() -> None:
    assert passes_to_final_sums([nn.Sequential(wrapped()), nn.Linear(2, 2)], 3) == 1
    assert passes_to_final_sums([wrapped(), nn.ModuleList([wrapped(static_graph=True)])], 3) == 2


def test_shards_are_not_summed_in_buckets() -> None:
    sharded = fully_shard(nn.Linear(6, 6), mesh=init_device_mesh("cpu", (3,)))

    assert passes_to_final_sums([sharded], 3) == 0
    assert passes_to_final_sums([sharded, nn.Linear(2, 2)], 3) == 2


def test_two_summands_have_one_order_but_a_hook_may_make_something_of_a_whole_bucket() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    two = dist.new_group([0, 1])
    plain, hooked = wrapped(process_group=two), wrapped(process_group=two)
    hooked.register_comm_hook(None, allreduce_hook)

    assert passes_to_final_sums([plain], 3) == 0
    assert passes_to_final_sums([hooked], 3) == 1
