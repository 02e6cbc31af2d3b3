"""An `Order` at work: seeded datasets, and a step's micro-batches one by one."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from elaunch.trainer.data.order import Micro, Order, Samples
from elaunch.trainer.data.sampling import global_states, set_global_states


class Seeded(Dataset[Any]):
    """A map-style dataset whose own randomness (augmentation) is the same at any world size and after any restart.

    While a micro-batch of `Order.batches` is read, `random`, numpy's global generator (if numpy is imported) and
    torch's CPU generator are seeded with the micro-batch's key. Afterwards their states are restored.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, ids: list[int]) -> list[Any]:
        """DataLoader calls this with the ids of one batch."""
        if not isinstance(ids, Samples):
            raise TypeError("Seeded needs the keys of Order.batches(); give them to DataLoader as batch_sampler")
        before = global_states()
        seed(ids.key)
        try:
            if hasattr(self._dataset, "__getitems__"):
                return cast("list[Any]", self._dataset.__getitems__(ids))
            return [self._dataset[index] for index in ids]
        finally:
            set_global_states(before)


def seed(key: int) -> None:
    """Seed `random`, numpy's global generator (if numpy is imported) and torch's CPU generator."""
    random.seed(key)
    torch.default_generator.manual_seed(key)
    if numpy := sys.modules.get("numpy"):
        # numpy takes seeds as numbers of 32 bits.
        numpy.random.seed([key & 0xFFFFFFFF, key >> 32])


def accumulate(
    model: nn.Module, order: Order, step: int, rank: int | None = None, world_size: int | None = None
) -> Iterator[Micro]:
    """This rank's micro-batches of `step`, one after the other, for forward and backward of each in the loop's body:

        for micro in accumulate(model, order, step):
            (loss(model(inputs), targets) * micro.weight).backward()

    `loss` must be a mean over the micro-batch's samples. torch's generators on CPU and CUDA are seeded with the
    micro-batch's key, so dropout masks do not depend on the world size. Only the last backward sums gradients over the
    ranks: it uses `no_sync()` of DDP and FSDP, or `set_requires_gradient_sync` of FSDP2. `rank` and `world_size`
    default to those of the process group; without a group the process is alone. Raises ValueError if the ranks of FSDP
    would run different numbers of forward passes, since they would wait for each other forever.
    """
    if rank is None or world_size is None:
        grouped = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    if _is_sharded(model) and not order.even and order.micro_batches % world_size:
        raise ValueError(
            f"{world_size} workers cannot share {order.micro_batches} micro-batches evenly, and each forward pass of "
            "FSDP needs all of them; give Order even=True"
        )
    for micro in order.parts(step, rank, world_size):
        torch.manual_seed(micro.key)
        with contextlib.nullcontext() if micro.is_last else _without_sync(model):
            yield micro


@contextlib.contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            yield


def _is_sharded(model: nn.Module) -> bool:
    # FSDP2's modules have the method. FSDP1 is recognised by name, since importing it would take long.
    return hasattr(model, "set_requires_gradient_sync") or type(model).__name__ == "FullyShardedDataParallel"
