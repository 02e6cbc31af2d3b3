"""What a forked child of this process must not do: it is without the threads of what it has inherited."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.forked import Child


def test_a_child_destroys_no_process_group_of_its_parent() -> None:
    """Without the group's threads its destructor would wait for ever. tests/conftest.py keeps it from being called."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist.all_reduce(torch.ones(1))
    garbage = SimpleNamespace(group=dist.group.WORLD)
    garbage.itself = garbage
    dist.destroy_process_group()
    gc.disable()
    try:
        del garbage
        with Child(gc.collect) as child:
            assert child.end() == 0
    finally:
        gc.enable()
