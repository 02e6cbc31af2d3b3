"""The ranks of a job as those who agree: plain values and host-memory tensors, sent over a group that takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")
_BUCKET_BYTES = 16 << 20


class Ranks:
    """This process among the ranks of `group`; without a process group, the only one.

    With `group` None the job's own is taken where it moves host memory (gloo), else one is made, by all ranks together.
    All methods are collectives, for the thread that trains.
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
        """Rank 0's value, on every rank; what the others pass is ignored."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=dist.get_global_rank(self.group, 0), group=self.group)
        found: Any = values[0]
        return found  # type: ignore[no-any-return]

    def from_all(self, value: Value) -> list[Value]:
        """Everybody's value, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def tensors_from_rank_0(
        self, tensors: Mapping[str, Tensor], kinds: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Rank 0's `tensors` (host memory) in the order of `kinds`, their sizes and types, which all ranks know.

        Sent in buckets, so that beside the tensors themselves no more than one bucket is held. To be read to the end.
        """
        names = list(kinds)
        if self.group is None:
            yield from ((name, tensors[name]) for name in names)
            return
        while names:
            bucket: list[str] = []
            size = 0
            while names and (not bucket or size + _nbytes(kinds[names[0]]) <= _BUCKET_BYTES):
                size += _nbytes(kinds[names[0]])
                bucket.append(names.pop(0))
            yield from self._bucket(bucket, size, tensors, kinds)

    def _bucket(
        self,
        names: list[str],
        size: int,
        tensors: Mapping[str, Tensor],
        kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
    ) -> Iterator[tuple[str, Tensor]]:
        raw = torch.empty(size, dtype=torch.uint8)
        views, begin = {}, 0
        for name in names:
            end = begin + _nbytes(kinds[name])
            # Bytes are copied: a view of another type would have to begin at a multiple of its size.
            views[name] = raw[begin:end]
            if self.leads:
                views[name].copy_(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8))
            begin = end
        if size:
            dist.broadcast(raw, src=dist.get_global_rank(self.group, 0), group=self.group)  # type: ignore[arg-type]
        for name, view in views.items():
            shape, dtype = kinds[name]
            yield name, tensors[name] if self.leads else view.clone().view(dtype).reshape(shape)


def _nbytes(kind: tuple[torch.Size, torch.dtype]) -> int:
    size, dtype = kind
    return size.numel() * dtype.itemsize
