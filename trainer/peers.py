"""What the ranks of a group tell each other besides gradients: small numbers to agree on, and copies of the state."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer.agreement import Ranks
from elaunch.trainer.packing import MARK

_CHUNK_BYTES = 64 << 20


class Peers(Ranks):
    """All ranks, over gloo whatever backend the gradients take; a process without a group has none to send to.

    `from_all` and `largest` are called by all ranks; a `send` meets a `length_from` and a `receive`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._last: dist.Work | None = None

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks."""
        if self.group is None:
            return list(values)
        found = torch.tensor(values)
        self._last = dist.all_reduce(found, dist.ReduceOp.MAX, self.group, async_op=True)
        assert self._last is not None
        self._last.wait()
        return [int(value) for value in found.tolist()]

    def part(self) -> None:
        """Nothing comes after the last `largest`, and the program may end at once.

        gloo's thread may still have that in its hands then. If it is the last one to, it needs the interpreter to let
        go of the tensor, and aborts the process where Python ends meanwhile (pytorch #190489). So this side never
        lets go of it.
        """
        if self._last is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._last))
            self._last = None

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
