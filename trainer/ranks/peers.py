"""What the ranks of a group tell each other besides gradients: small numbers to agree on, and copies of the state."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.ranks.agreement import Ranks
from elaunch.trainer.state.packing import MARK

_CHUNK_BYTES = 64 << 20
# More than gloo has threads, which are two.
_HELD = 8


class Peers(Ranks):
    """All ranks, over gloo whatever backend the gradients take; a process without a group has none to send to.

    `from_all` and `largest` are called by all ranks; a `send` meets a `length_from` and a `receive`.
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
        """The program may end at once, if the last collective was `largest`.

        gloo's threads may still have the newest ones in their hands then. The last to have one needs the interpreter to
        let go of its tensor, and aborts the process where Python ends meanwhile (pytorch #190489). So this side never
        lets go of them.
        """
        for work in self._newest:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        self._newest.clear()

    def begin_send(self, region: Tensor, rank: int) -> list[dist.Work]:
        """Begin to send a region of `packing` without its mark; it is sent when all of these have been waited for."""
        parts = [torch.tensor([region.numel()]), *_chunks(region)]
        return [work for part in parts if (work := dist.isend(part, rank, self.group)) is not None]

    def send(self, region: Tensor, rank: int) -> None:
        """The same, to its end."""
        for work in self.begin_send(region, rank):
            work.wait()

    def length_from(self, rank: int) -> int:
        """How many bytes `receive` will get."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, self.group)
        return int(length.item())

    def receive(self, region: Tensor, rank: int) -> None:
        """Receive all but the mark into `region`, which has the length that `length_from` said."""
        for chunk in _chunks(region):
            dist.recv(chunk, rank, self.group)


def _chunks(region: Tensor) -> Sequence[Tensor]:
    # Of nothing torch makes one empty chunk.
    return torch.split(region[len(MARK) :], _CHUNK_BYTES) if region.numel() else ()
