"""A hook that sends eight bits of each gradient element, with a scale for each parameter's tensor.

torch's own `quantization_pertensor_hook` has one scale for a whole bucket, whose tensors differ by orders of magnitude,
and each rank sends all of its codes to all others. Here each rank sums a share of the bucket: it gets the codes of that
share, and sends the codes of the mean.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

# torch 2.13 has another name for it, and warns at the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
LEVELS = 255
# The lowest value of a tensor and the size of a level, in float32.
HEADER_BYTES = 8


class Quantised:
    """The mean of all ranks' quantised gradients, quantised again. DDP is to call `hook`.

    All ranks decode the same bytes, so their results are equal to the bit. A gradient that is not finite makes the mean
    NaN in its tensor's part of a share.
    """

    def __init__(self) -> None:
        self._newest: _Exchange | None = None

    def hook(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin a bucket's exchange, and the second half of that of the bucket before."""
        # A second half that began in a callback would begin on each rank in another order, and gloo pairs collectives
        # by their order. What is on the way meanwhile is this bucket's first half.
        before = None if bucket.index() == 0 else self._newest
        newest = self._newest = _Exchange(group, bucket)
        if before is not None:
            before.gather()
        if bucket.is_last():
            newest.gather()
            self._newest = None
        return newest.mean


class _Exchange:
    """The exchange of one bucket. It begins at once."""

    def __init__(self, group: dist.ProcessGroup, bucket: GradBucket) -> None:
        self._group, self._gradient = group, bucket.buffer()
        self._shares = shares([part.numel() for part in bucket.gradients()], group.size())
        messages = [encode(part, sizes) for part, sizes in zip(self._split(self._gradient), self._shares, strict=True)]
        own = message_bytes(self._own)
        self._received = self._bytes(group.size() * own)
        self._work = dist.all_to_all_single(
            self._received,
            torch.cat(messages),
            output_split_sizes=[own] * group.size(),
            input_split_sizes=[message.numel() for message in messages],
            group=group,
            async_op=True,
        )
        self._gathered: torch.futures.Future[None] = torch.futures.Future(devices=devices_of(self._gradient))
        # What `then` raises reaches the backward pass with its words. An exception that is set on a future does not.
        self.mean: torch.futures.Future[Tensor] = self._gathered.then(self._decode)

    @property
    def _own(self) -> Sequence[int]:
        return self._shares[self._group.rank()]

    def gather(self) -> None:
        """Sum this rank's share, and begin to send its mean to all."""
        self._work.wait()
        total = torch.zeros(sum(self._own), dtype=torch.float32, device=self._gradient.device)
        for message in self._received.view(self._group.size(), -1):
            add_decoded(total, message, self._own)
        mean = encode(total.div_(self._group.size()), self._own)
        # All messages have the length of the longest.
        longest = max(map(message_bytes, self._shares))
        padded = torch.cat([mean, mean.new_zeros(longest - mean.numel())])
        self._received = self._bytes(self._group.size() * longest)
        self._work = _all_gather(self._received, padded, group=self._group, async_op=True)
        # For GPUs its callbacks run in the order of the stream, after the exchange.
        self._work.get_future().add_done_callback(lambda _: self._gathered.set_result(None))

    def _decode(self, _: torch.futures.Future[None]) -> Tensor:
        # Raises here if the exchange has failed.
        self._work.get_future().value()
        parts = self._split(self._gradient.zero_())
        for part, message, sizes in zip(parts, self._received.view(len(parts), -1), self._shares, strict=True):
            add_decoded(part, message[: message_bytes(sizes)], sizes)
        # DDP keeps the future until the next step.
        del self._received, self._work
        return self._gradient

    def _split(self, bucket: Tensor) -> Sequence[Tensor]:
        return torch.split(bucket, [sum(sizes) for sizes in self._shares])

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._gradient.device)


def devices_of(tensor: Tensor) -> list[int | str | torch.device]:
    """What a future needs to know of a tensor that it will have: its GPU."""
    return [tensor.device] if tensor.device.type != "cpu" else []


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Cut parts with these `sizes` into `count` shares of nearly equal size: the sizes of the pieces in each."""
    each = -(-sum(sizes) // count)
    found: list[list[int]] = [[] for _ in range(count)]
    offset = 0
    for size in sizes:
        end = offset + size
        while offset < end:
            share = offset // each
            piece = min(end, (share + 1) * each) - offset
            found[share].append(piece)
            offset += piece
    return found


def message_bytes(sizes: Sequence[int]) -> int:
    """The length of what `encode` makes of parts with these sizes."""
    return HEADER_BYTES * len(sizes) + sum(sizes)


def encode(gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    """The bytes that stand for `gradient`, a flat tensor of parts with these `sizes`: all headers, then all codes."""
    if not sizes:
        return torch.empty(0, dtype=torch.uint8, device=gradient.device)
    parts = torch.split(gradient, list(sizes))
    lows = torch.stack([part.min() for part in parts]).float()
    steps = (torch.stack([part.max() for part in parts]).float() - lows) / LEVELS
    message = torch.empty(message_bytes(sizes), dtype=torch.uint8, device=gradient.device)
    header, codes = message[: HEADER_BYTES * len(sizes)], message[HEADER_BYTES * len(sizes) :]
    header.copy_(torch.stack([lows, steps]).view(torch.uint8).flatten())
    # A part of equal elements has no range. Its codes are 0, and its lowest value is all of it.
    levels = steps.where(steps != 0, 1.0)
    # Part by part, so that the values in float32 take the room of one parameter and not of the bucket.
    for part, low, level, target in zip(parts, lows, levels, torch.split(codes, list(sizes)), strict=True):
        # Casting a NaN to an integer is undefined. What is not finite is in the header too.
        target.copy_((part.float() - low).div_(level).round_().nan_to_num_(0.0).clamp_(0, LEVELS))
    return message


def add_decoded(total: Tensor, message: Tensor, sizes: Sequence[int]) -> None:
    """Add the gradient that `encode` has made `message` of to `total`."""
    header = HEADER_BYTES * len(sizes)
    # A row of a table of bytes need not begin where a float may.
    lows, steps = message[:header].clone().view(torch.float32).view(2, -1)
    parts, codes = torch.split(total, list(sizes)), torch.split(message[header:], list(sizes))
    for part, low, step, its in zip(parts, lows, steps, codes, strict=True):
        part.add_(its.float().mul_(step).add_(low))
