"""Tensors of a state that has parts: what a restart could not divide is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elaunch.trainer.state.live_tensors import LiveTensors


@pytest.fixture
def parameter() -> Iterator[nn.Parameter]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield nn.Parameter(DTensor.from_local(torch.ones(1, 3), init_device_mesh("cpu", (2,)), [Shard(0)]))
    dist.destroy_process_group()


@pytest.mark.parametrize(("value", "is_kept"), [(torch.ones(1, 3), False), (torch.ones(()), True), (None, True)])
def test_an_optimizers_tensor_of_this_ranks_part_alone_is_refused_by_name(
    parameter: nn.Parameter, value: Tensor | None, is_kept: bool
) -> None:
    model = nn.Module()
    model.weight = parameter
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[parameter]["moment"] = torch.zeros_like(parameter) if value is None else value
    tensors = LiveTensors(model, [optimizer], [])

    if is_kept:
        tensors.require_dense()
    else:
        with pytest.raises(TypeError, match=r"^`weight: moment of the optimizer` cannot be kept: it has the shape of"):
            tensors.require_dense()
