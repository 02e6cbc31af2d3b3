"""What ranks exchange besides gradients: small numbers to agree on, and copies of the state."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.ranks.agreement import Ranks
from elaunch.trainer.state.region import MARK

# Along a chain of n ranks the last one has a chunk n transfers later than the first: small ones cost less time.
_CHUNK_BYTES = 16 << 20
# More than the number of gloo's threads, which is two.
_HELD = 8


class Peers(Ranks):
    """All ranks, over gloo, also if gradients use another backend. A process without a group has no peer.

    All ranks call `from_all` and `largest` together. For each `send` the receiver calls `length_from` and `receive`.
    What several ranks need goes along a chain of them: each passes on to the next what it receives (`pass_on`), so
    that n receivers take one transfer's time, not n times that.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._newest: deque[dist.Work] = deque(maxlen=_HELD)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks."""
        if self.group is None:
            return list(values)
        found = torch.tensor(values)
        work = dist.all_reduce(found, dist.ReduceOp.MAX, self.group, async_op=True)
        assert work is not None
        self._newest.append(work)
        work.wait()
        return [int(value) for value in found.tolist()]

    def part(self) -> None:
        """After this the program may end at once, if the last collective was `largest`.

        gloo's threads may still hold the newest operations. The last holder of an operation needs the interpreter to
        release its tensor, and aborts the process if Python ends meanwhile (pytorch #190489). So this side leaks a
        reference to each of them.
        """
        for work in self._newest:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        self._newest.clear()

    def begin_send(self, region: Tensor, rank: int) -> list[dist.Work]:
        """Begin to send a region without its mark. It is sent when every returned operation is done."""
        parts = [torch.tensor([region.numel()]), *_chunks(region)]
        target = self._global(rank)
        return [work for part in parts if (work := dist.isend(part, target, self.group)) is not None]

    def send(self, region: Tensor, rank: int) -> None:
        """Send a region without its mark, and wait until it is sent."""
        for work in self.begin_send(region, rank):
            work.wait()

    def length_from(self, rank: int) -> int:
        """The number of bytes that `receive` will get."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, self._global(rank), self.group)
        return int(length.item())

    def receive(self, region: Tensor, rank: int, *, pass_on: int | None = None) -> None:
        """Receive everything but the mark into `region`, whose length is what `length_from` returned.

        Each chunk is sent on to rank `pass_on` while the next one arrives.
        """
        passing = []
        if pass_on is not None:
            passing.append(dist.isend(torch.tensor([region.numel()]), self._global(pass_on), self.group))
        for chunk in _chunks(region):
            dist.recv(chunk, self._global(rank), self.group)
            if pass_on is not None:
                passing.append(dist.isend(chunk, self._global(pass_on), self.group))
        for work in passing:
            if work is not None:
                work.wait()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _chunks(region: Tensor) -> Sequence[Tensor]:
    # torch.split would make one empty chunk of an empty region.
    return torch.split(region[len(MARK) :], _CHUNK_BYTES) if region.numel() else ()


def neighbours(chain: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """The ranks before and after `rank` in a chain; None at its ends."""
    place = chain.index(rank)
    return (chain[place - 1] if place else None), (chain[place + 1] if place + 1 < len(chain) else None)
