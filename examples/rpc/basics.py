"""The calls of torch.distributed.rpc: sync, async, remote references, and functions that answer later.

elaunch --nproc-per-node 3 basics.py
"""

from __future__ import annotations

import os
import threading

import torch
from joined import joined, names
from torch.distributed import rpc
from torch.futures import Future


class Counter:
    """An object that stays in one process. Others have a reference to it (an RRef)."""

    def __init__(self) -> None:
        self._count, self._lock = 0, threading.Lock()

    def add(self, number: int) -> int:
        """The sum so far. Several RPCs run at once, each in a thread of the owner."""
        with self._lock:
            self._count += number
            return self._count


class Meeting:
    """Answers everybody when the last one has come, and blocks no thread until then."""

    def __init__(self, size: int) -> None:
        self._size, self._come, self._lock = size, 0, threading.Lock()
        self._sum = torch.zeros(2)
        self._future: Future[torch.Tensor] = Future()

    def meet(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """A future of the sum of all tensors."""
        with self._lock:
            self._sum, self._come, future = self._sum + tensor, self._come + 1, self._future
            if self._come == self._size:
                future.set_result(self._sum)
                self._sum, self._come, self._future = torch.zeros(2), 0, Future()
            return future


meeting = Meeting(int(os.environ["WORLD_SIZE"]))


@rpc.functions.async_execution
def meet(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """The result is sent when the future has it."""
    return meeting.meet(tensor)


def main() -> None:
    """Rank 0 calls the others; all of them meet on rank 0."""
    with joined() as me:
        rank, others = int(os.environ["RANK"]), names(os.environ["ROLE_NAME"])
        if rank == 0:
            # One after the other, and all at once.
            sums = [rpc.rpc_sync(other, torch.add, args=(torch.ones(()), 1)).item() for other in others]
            pids = torch.futures.wait_all([rpc.rpc_async(other, os.getpid) for other in others])
            print(f"{me}: sums {sums} from {len(set(pids))} processes")
            # The counter lives in the last process. A method is called where the object is; `to_here` would copy it.
            counter = rpc.remote(others[-1], Counter)
            for number in range(1, 5):
                total = counter.rpc_sync().add(number)
            print(f"{me}: the counter on {counter.owner_name()} has {total}")
        for _ in range(3):
            result = rpc.rpc_sync(others[0], meet, args=(torch.full((2,), float(rank)),))
        print(f"{me}: the sum of all ranks is {result[0]:g}")


if __name__ == "__main__":
    main()
