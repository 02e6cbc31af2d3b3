"""What the ranks tell each other besides gradients: small things that all must agree on, and copies of the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.packing import MARK

_CHUNK_BYTES = 64 << 20


class Peers:
    """All ranks of the group over gloo, whatever backend the gradients take; or this process alone, without a group.

    Making one is collective, as is every call but `send` and `receive`.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            # A group of its own costs a start some milliseconds per rank.
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, in rank order. What peers send is trusted: they run the same program."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks."""
        if self._group is None:
            return list(values)
        found = torch.tensor(values)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return [int(value) for value in found.tolist()]

    def send(self, region: Tensor, rank: int) -> None:
        """Send a region of `packing` without its mark to the rank that calls `length_from` and `receive`."""
        dist.send(torch.tensor([region.numel()]), rank, self._group)
        for chunk in _chunks(region):
            dist.send(chunk, rank, self._group)

    def length_from(self, rank: int) -> int:
        """How many bytes `receive` will get."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, self._group)
        return int(length.item())

    def receive(self, region: Tensor, rank: int) -> None:
        """Receive all but the mark into `region`, which has the length that `length_from` said."""
        for chunk in _chunks(region):
            dist.recv(chunk, rank, self._group)


def _chunks(region: Tensor) -> Sequence[Tensor]:
    return torch.split(region[len(MARK) :], _CHUNK_BYTES)
