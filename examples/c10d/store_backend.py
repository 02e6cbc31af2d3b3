"""A backend of c10d in Python, as a third party would ship it: importing this module makes its name known.

Every message goes through the store of the rendezvous. That is slow, and works wherever ranks can meet at all. It has
what DDP needs: all-reduce (sum), broadcast, all-gather and barrier, on CPUs.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Private, but what torch's own backends in Python use: a Work whose result is there already.
from torch._C._distributed_c10d import _create_work_from_future


class StoreGroup(dist.ProcessGroup):
    """The ranks of one group. Each collective has a number, under which each rank writes what it gives."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._number = 0
        store.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "store"

    def allreduce(self, tensors: list[Tensor], options: object = None) -> dist.Work:
        # All ranks add in the order of ranks, so they get the same bits.
        for tensor, parts in zip(tensors, self._all_of(tensors), strict=True):
            tensor.copy_(torch.stack(parts).sum(0))
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object = None) -> dist.Work:
        for output, parts in zip(outputs, self._all_of(inputs), strict=True):
            for target, part in zip(output, parts, strict=True):
                target.copy_(part)
        return _done(outputs)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:
        for tensor, parts in zip(tensors, self._all_of(tensors), strict=True):
            tensor.copy_(parts[options.rootRank])
        return _done(tensors)

    def barrier(self, options: object = None) -> dist.Work:
        self._all_of([torch.zeros(1)])
        return _done([])

    def _all_of(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """All ranks' versions of each tensor, by rank."""
        self._number += 1
        for index, tensor in enumerate(tensors):
            own = tensor.detach().contiguous().flatten().view(torch.uint8)
            self._store.set(f"{self._number}/{index}/{self._rank}", bytes(own.tolist()).decode("latin-1"))
        found = [
            [self._read(index, rank, tensor) for rank in range(self._size)] for index, tensor in enumerate(tensors)
        ]
        # Whoever is here has all of the collective before: nobody reads that any more.
        for index in range(len(tensors)):
            self._store.delete_key(f"{self._number - 1}/{index}/{self._rank}")
        return found

    def _read(self, index: int, rank: int, like: Tensor) -> Tensor:
        content = self._store.get(f"{self._number}/{index}/{rank}").decode().encode("latin-1")
        return torch.frombuffer(bytearray(content), dtype=like.dtype).view_as(like)


def _done(result: object) -> dist.Work:
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StoreGroup:
    return StoreGroup(store, rank, size, timeout)


dist.Backend.register_backend("store", make, devices=["cpu"])
