"""A step of several micro-batches exchanges its gradients once, and they are those of all its samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.data.order import Order
from elaunch.trainer.data.sampling import accumulate

INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_ddp_exchanges_in_the_last_of_a_steps_micro_batches_alone() -> None:
    module, order = nn.Linear(4, 1), Order(12, global_batch=6, micro_batch=2)
    model = DistributedDataParallel(module)
    rows: list[Tensor] = []
    exchanged_after: list[int] = []

    # Annotated, the bucket must be of the class itself, and not of its name.
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        exchanged_after.append(len(rows))
        return allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    for micro in accumulate(model, order, 1):
        rows.append(INPUTS[[order.sample(position) for position in order.loaded(1, micro.number)]])
        (model(rows[-1]).square().mean() * micro.weight).backward()
    found = module.weight.grad

    module.weight.grad = None
    module(torch.cat(rows)).square().mean().backward()
    assert exchanged_after == [3]
    torch.testing.assert_close(found, module.weight.grad)
