"""This process's rank, as its launcher says in the environment; how it joins and leaves the process group."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankInfo:
    """This worker's rank among `world_size` workers, and how often the group was restarted.

    `launched` is False if no launcher set `RANK`: a single process, which needs no address to meet others.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    generation: int = 0
    restarts: int = 0
    launched: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankInfo:
        """Read torchrun's variables and `ELAUNCH_GENERATION`. Without elaunch the generation is the restart count."""
        restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        generation = int(environ.get("ELAUNCH_GENERATION", restarts))
        if "RANK" not in environ:
            return cls(generation=generation, restarts=restarts)
        return cls(
            rank=int(environ["RANK"]),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            world_size=int(environ["WORLD_SIZE"]),
            generation=generation,
            restarts=restarts,
            launched=True,
        )

    @property
    def leads(self) -> bool:
        """Whether this is rank 0: only that rank writes files and prints."""
        return self.rank == 0


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
