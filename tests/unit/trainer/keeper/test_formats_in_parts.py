"""Tensors that cannot be kept, in a state of which each rank has a part: refused at the door as in any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from elaunch.trainer import Keeper
from tests.harness import free_ports

pytestmark = pytest.mark.usefixtures("group", "memory")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{free_ports(1)[0]}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_optimizers_tensor_that_is_made_of_others_is_refused_by_its_parameters_name() -> None:
    model: Any = fully_shard(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["odd"] = TwoTensor(torch.ones(2), torch.ones(2))
    keeper = Keeper(model, optimizer, per_rank=())

    with (
        pytest.raises(TypeError, match=r"^`weight: odd of the optimizer` cannot be kept: a .*TwoTensor cannot be kept"),
        keeper,
    ):
        pytest.fail("it was entered")
