"""The process group: joining and leaving it, and what the ranks tell each other besides the gradients."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

# DDP and optimizers import it anyway; imported while a group exists, it keeps that group alive for ever (see `leave`).
import torch._dynamo
import torch.distributed as dist

from elaunch.trainer.ranks.place import RankInfo


def join(place: RankInfo) -> torch.device:
    """Meet the other ranks and return this one's device: NCCL and `cuda:<local_rank>` with GPUs, gloo on CPUs without.

    A process that nobody launched is a group of one, which needs no address.
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
    """Wait until every rank is here, then part; to be called when nothing refers to the group's models any more.

    Only then are the group's threads gone that let go of tensors. One that does so while Python ends aborts the process
    (pytorch #190489): with three workers on two cores, one run in seven. `Peers.part` is for who cannot wait for that.
    """
    sum_over_ranks([0.0], device)
    gc.collect()
    dist.destroy_process_group()


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """The element-wise sum over all ranks, in float64; everybody gets the same bits."""
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return [float(value) for value in summed.tolist()]


def from_rank_0(content: bytes, device: torch.device) -> bytearray:
    """Rank 0's `content`, on every rank; what the others pass is ignored."""
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    received = bytearray(content) if dist.get_rank() == 0 else bytearray(int(length.item()))
    if received:
        shared = torch.frombuffer(received, dtype=torch.uint8)
        on_device = shared.to(device)
        dist.broadcast(on_device, src=0)
        shared.copy_(on_device)
    return received
