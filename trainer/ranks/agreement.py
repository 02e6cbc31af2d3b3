"""Collectives on plain values and on tensors in host memory, over a process group that supports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")
_BUCKET_BYTES = 4 << 20


class Ranks:
    """This process among the ranks of `group`. Without a process group it is the only rank.

    With `group` None the job's own group is used if it moves host memory (gloo); else all ranks create a gloo group
    together. All methods are collectives. Call them only from the training thread.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size = 0, 1
        self.group: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        if group is None:
            takes_host_memory = "cpu:gloo" in dist.get_backend_config(dist.group.WORLD)
            group = dist.group.WORLD if takes_host_memory else dist.new_group(backend="gloo")
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.world_size > 1:
            self.group = group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def from_rank_0(self, value: Value | None) -> Value:
        """Rank 0's value, on every rank; the values of other ranks are ignored."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=dist.get_global_rank(self.group, 0), group=self.group)
        found: Any = values[0]
        return found  # type: ignore[no-any-return]

    def from_all(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def fill_from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        """Fill these tensors with rank 0's values. They are contiguous, in host memory, and alike on all ranks.

        Large tensors are sent without a copy, small ones together in one bucket.
        """
        if self.group is None:
            return
        small: list[Tensor] = []
        for flat in (tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()):
            if flat.numel() >= _BUCKET_BYTES:
                self._broadcast(flat)
                continue
            if sum(each.numel() for each in small) + flat.numel() > _BUCKET_BYTES:
                self._broadcast_together(small)
                small = []
            small.append(flat)
        if small:
            self._broadcast_together(small)

    def _broadcast_together(self, parts: list[Tensor]) -> None:
        bucket = torch.cat(parts)
        self._broadcast(bucket)
        if not self.leads:
            for part, received in zip(parts, torch.split(bucket, [part.numel() for part in parts]), strict=True):
                part.copy_(received)

    def _broadcast(self, raw: Tensor) -> None:
        assert self.group is not None
        dist.broadcast(raw, src=dist.get_global_rank(self.group, 0), group=self.group)
