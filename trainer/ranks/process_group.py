"""The process group: how to join and leave it, and collectives on small values."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

# DDP and optimizers import it anyway. If it is first imported while a group exists, it keeps that group alive.
import torch._dynamo
import torch.distributed as dist

from elaunch.trainer.ranks.place import RankInfo


def join(place: RankInfo) -> torch.device:
    """Meet the other ranks. Returns this rank's device.

    With GPUs it is `cuda:<local_rank>` with NCCL, without GPUs the CPU with gloo. A process without a launcher is a
    group of one, which needs no address.
    """
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if place.launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return device


def leave(device: torch.device) -> None:
    """Wait until every rank is here, then destroy the group. Call it when nothing refers to the group's models.

    Only then are the group's threads gone. A thread that releases a tensor while Python ends aborts the process
    (pytorch #190489): with three workers on two cores, one run in seven.
    """
    sum_over_ranks([0.0], device)
    gc.collect()
    dist.destroy_process_group()


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """The element-wise sum over all ranks, in float64. Every rank gets the same bits."""
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return [float(value) for value in summed.tolist()]
