"""A hook that sends eight bits of each gradient element, with a scale for each parameter's tensor.

torch's own `quantization_pertensor_hook` has one scale for a whole bucket, whose tensors differ by orders of magnitude,
and two collectives. Here the scales travel with the codes, in one.
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


def quantised_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of all ranks' quantised gradients. Each rank receives N - 1 bytes per element, for N ranks.

    All ranks decode the same bytes in the same order, so their results are equal to the bit. A gradient that is not
    finite makes the mean of its tensor NaN.
    """
    gradient = bucket.buffer()
    sizes = [part.numel() for part in bucket.gradients()]
    message = encode(gradient, sizes)
    received = torch.empty(group.size() * message.numel(), dtype=torch.uint8, device=gradient.device)
    work = _all_gather(received, message, group=group, async_op=True)

    def mean(done: torch.futures.Future[Tensor]) -> Tensor:
        # Raises here if the exchange has failed.
        done.value()
        gradient.zero_()
        for one in received.view(group.size(), -1):
            add_decoded(gradient, one, sizes)
        total: Tensor = gradient.div_(group.size())
        return total

    # For GPUs its callbacks run in the order of the stream, after the exchange.
    future: torch.futures.Future[Tensor] = work.get_future().then(mean)
    return future


def encode(gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    """The bytes that stand for `gradient`, a flat tensor of parts with these `sizes`: all headers, then all codes."""
    parts = torch.split(gradient, list(sizes))
    lows = torch.stack([part.min() for part in parts]).float()
    steps = (torch.stack([part.max() for part in parts]).float() - lows) / LEVELS
    message = torch.empty(HEADER_BYTES * len(sizes) + gradient.numel(), dtype=torch.uint8, device=gradient.device)
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
