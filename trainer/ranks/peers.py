"""The ranks as peers: besides gradients they exchange small numbers to agree on, and copies of the state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from elaunch.trainer.ranks.agreement import Ranks
from elaunch.trainer.ranks.tensor_bytes import bytes_of
from elaunch.trainer.state.region import MARK

_SKIPPED_BYTES = 1 << 20


class Peers(Ranks):
    """All ranks, also those that need regions of the state from each other. A process without a group has no peer.

    All ranks call `from_all` and `largest` together. For each `send` the receiver calls `length_from` and `receive`.
    A region that several ranks need goes along a chain of them: each receives it and passes it on to the next
    (`pass_on`), so that n receivers take one transfer's time, not n times that.
    """

    def largest(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks."""
        return self._channel.largest(values) if self.world_size > 1 else [int(value) for value in values]

    def begin_send(self, region: Tensor, rank: int) -> None:
        """Begin to send a region without its mark. It must not change until `flush` returns."""
        self._channel.begin_send(rank, _data_of(region))

    def flush(self) -> None:
        """Wait until all that this rank has begun to send is sent."""
        self._channel.flush()

    def send(self, region: Tensor, rank: int) -> None:
        """Send a region without its mark, and wait until it is sent."""
        self.begin_send(region, rank)
        self.flush()

    def length_from(self, rank: int) -> int:
        """The number of bytes that `receive` will get."""
        length = self._channel.length_from(rank)
        return length + len(MARK) if length else 0

    def receive(self, region: Tensor, rank: int, *, pass_on: int | None = None) -> None:
        """Receive everything but the mark into `region`, whose length is what `length_from` returned.

        Each part is sent on to rank `pass_on` while the rest arrives.
        """
        self._channel.receive_into(_data_of(region), rank, pass_on=pass_on)

    def skip(self, length: int, rank: int) -> None:
        """Receive what `length_from` has told, and keep nothing of it."""
        left = length - len(MARK)
        buffer = memoryview(bytearray(min(left, _SKIPPED_BYTES)))
        while left:
            part = buffer[: min(left, len(buffer))]
            self._channel.receive_into(part, rank)
            left -= len(part)


def _data_of(region: Tensor) -> memoryview:
    return bytes_of(region)[len(MARK) :]


def neighbours(chain: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """The ranks before and after `rank` in a chain; None at its ends."""
    place = chain.index(rank)
    return (chain[place - 1] if place else None), (chain[place + 1] if place + 1 < len(chain) else None)
