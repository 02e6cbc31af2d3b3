"""The mesh that docs/keeper.md shows for HSDP."""

from __future__ import annotations

import re

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import REPOSITORY


def test_the_mesh_for_hsdp_has_two_replicas_of_each_shard() -> None:
    page = (REPOSITORY / "docs" / "keeper.md").read_text()
    block = re.search(r"^```python\n(mesh = .*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert block
    model: nn.Module = nn.Linear(4, 4)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)  # type: ignore[attr-defined]
    try:
        names = {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard, "model": model, "world_size": 4}
        exec(block[1], names)
    finally:
        dist.destroy_process_group()

    assert names["mesh"].mesh.tolist() == [[0, 1], [2, 3]]  # type: ignore[attr-defined]
    assert [placement.is_shard() for placement in model.weight.placements] == [False, True]
