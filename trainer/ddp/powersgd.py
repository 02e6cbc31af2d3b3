"""PowerSGD: ranks exchange two thin factors of each gradient matrix in place of the matrix.

The method is that of Vogels et al., "PowerSGD" (2019), with error feedback and warm start, as in torch's
`powerSGD_hook`. With several buckets torch's hook starts collectives from callbacks, in another order on each rank, and
hangs with gloo; so it cannot be used.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

# A matrix is compressed only if its factors have less than 1/SAVES_MIN of its elements.
SAVES_MIN = 2
Shape = tuple[int, int]


@dataclass(frozen=True)
class Parts:
    """How a flat tensor is compressed: the places of its matrices, and of what is sent whole, as offsets."""

    matrices: tuple[tuple[int, Shape], ...]
    whole: tuple[tuple[int, int], ...]


def parts_of(shapes: Sequence[Sequence[int]], rank: int) -> Parts:
    """Each parameter's gradient is a matrix: its first dimension by all others. Vectors are sent whole."""
    matrices: list[tuple[int, Shape]] = []
    whole: list[tuple[int, int]] = []
    offset = 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // max(rows, 1)
        if rank * (rows + columns) * SAVES_MIN < size and len(shape) > 1:
            matrices.append((offset, (rows, columns)))
        else:
            whole.append((offset, size))
        offset += size
    return Parts(tuple(matrices), tuple(whole))


class PowerSgd:
    """The hook's state: each bucket's error, and the right factors of all matrices, by their shapes.

    The first `start` steps exchange whole gradients.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, start: int) -> None:
        self.group, self.rank, self.start = group, rank, start
        self._step = 0
        self._errors: list[Tensor] = []
        self._factors: list[Tensor] = []
        self._buckets: list[_Bucket] = []

    def state_dict(self) -> dict[str, Any]:
        """The present state, not copied."""
        return {"step": self._step, "errors": self._errors, "factors": self._factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of `state_dict`, which is not copied."""
        self._step, self._errors, self._factors = state["step"], [*state["errors"]], [*state["factors"]]

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The future mean of all ranks' gradients. The last bucket's call completes all of them."""
        # DDP makes its buckets anew in the first steps, and an error belongs to a bucket.
        if self._step < self.start:
            self._step += bucket.is_last()
            return allreduce_hook(self.group, bucket)
        if bucket.index() == 0:
            # An earlier backward pass may have failed halfway.
            self._buckets = []
        shapes = [part.shape for part in bucket.gradients()]
        self._buckets.append(_Bucket(bucket.buffer(), parts_of(shapes, self.rank)))
        future = self._buckets[-1].future
        if bucket.is_last():
            # All ranks come here with the same matrices, so two messages are enough, and their order is certain. They
            # are small: nothing is lost if the backward pass is over.
            self._exchange_all(self._buckets)
            self._buckets = []
            self._step += 1
        return future

    def _exchange_all(self, buckets: Sequence["_Bucket"]) -> None:
        if [each.shape for each in self._errors] != [each.gradient.shape for each in buckets]:
            # The first compression, or a restart with other buckets.
            self._errors = [torch.zeros_like(each.gradient) for each in buckets]
            self._factors = []
        batches: dict[Shape, _Batch] = defaultdict(_Batch)
        for bucket, error in zip(buckets, self._errors, strict=True):
            # The sum of gradient and error stands where the error stood, and the mean comes where the gradient is.
            error.add_(bucket.gradient)
            for shape, mean, own in bucket.matrices(error):
                batches[shape].add(mean, own)
        # Sums in half precision would lose what the factors are to keep.
        wide = reduce(torch.promote_types, [each.gradient.dtype for each in buckets], torch.float32)
        whole = [part.to(wide) for each, error in zip(buckets, self._errors, strict=True) for part in each.whole(error)]
        self._factors = self._factors or [
            self._random(len(batch.owns), columns, batch.owns[0]) for (_, columns), batch in batches.items()
        ]
        lefts = [each.times(orthogonal(right), wide) for each, right in self._pairs(batches)]
        *lefts, sums = self._summed([*lefts, torch.cat([*whole, self._errors[0].new_empty(0, dtype=wide)])])
        lefts = [orthogonal(left) for left in lefts]
        rights = [each.transposed_times(left, wide) for each, left in zip(batches.values(), lefts, strict=True)]
        self._factors = [right.div_(self.group.size()) for right in self._summed(rights)]
        for (batch, right), left in zip(self._pairs(batches), lefts, strict=True):
            batch.decode(left, right)
        self._finish(buckets, sums.div_(self.group.size()))

    def _pairs(self, batches: Mapping[Shape, "_Batch"]) -> Iterator[tuple["_Batch", Tensor]]:
        """Each batch with its right factors."""
        return zip(batches.values(), self._factors, strict=True)

    def _finish(self, buckets: Sequence["_Bucket"], whole: Tensor) -> None:
        offset = 0
        for bucket, error in zip(buckets, self._errors, strict=True):
            for mean, own in zip(bucket.whole(bucket.gradient), bucket.whole(error), strict=True):
                mean.copy_(whole[offset : offset + mean.numel()])
                # Nothing of it was left out.
                own.copy_(mean)
                offset += mean.numel()
            error.sub_(bucket.gradient)
            bucket.future.set_result(bucket.gradient)

    def _random(self, count: int, columns: int, like: Tensor) -> Tensor:
        """The first right factors: the same on all ranks. The generators of the training are left alone."""
        source = torch.Generator().manual_seed(columns)
        return torch.randn(count, columns, self.rank, generator=source).to(like.device)

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of all over the ranks, in one message."""
        if not tensors:
            return []
        message = torch.cat([each.flatten() for each in tensors])
        dist.all_reduce(message, group=self.group)
        parts = torch.split(message, [each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def powersgd_hook(state: PowerSgd, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for each bucket."""
    return state.exchange(bucket)


def orthogonal(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of each matrix of a batch: (matrices, rows, columns) float32.

    A column that is 0 becomes a column of the unit matrix, so a gradient that was 0 is seen when it is not any more.
    """
    rows, columns = matrices.shape[1:]
    unit = torch.eye(rows, columns, dtype=matrices.dtype, device=matrices.device)
    found = torch.where((matrices == 0).all(dim=1, keepdim=True), unit, matrices)
    # Lengths are near 1 first: squares of small gradients would be 0.
    found = found / found.abs().amax(dim=1, keepdim=True)
    for column in range(columns):
        its = found[:, :, column : column + 1]
        before = found[:, :, :column]
        # Once is not enough for columns that are nearly parallel.
        for _ in range(2 if column else 0):
            its -= before @ (before.mT @ its)
        its /= torch.linalg.vector_norm(its, dim=1, keepdim=True).clamp_min(torch.finfo(its.dtype).tiny)
    return found


class _Batch:
    """All matrices of one shape: where each rank's own stand, and where their means are to stand.

    They stay where they are, one by one: to copy them into one tensor would take longer than the products do.
    """

    def __init__(self) -> None:
        self.means: list[Tensor] = []
        self.owns: list[Tensor] = []

    def add(self, mean: Tensor, own: Tensor) -> None:
        self.means.append(mean)
        self.owns.append(own)

    def times(self, rights: Tensor, dtype: torch.dtype) -> Tensor:
        """The products of each own matrix and its right factor."""
        # The thin factor is on the left: the other way round BLAS takes up to 15 times as long.
        pairs = zip(self.owns, rights, strict=True)
        return torch.stack([right.t().to(own.dtype) @ own.t() for own, right in pairs]).mT.to(dtype)

    def transposed_times(self, lefts: Tensor, dtype: torch.dtype) -> Tensor:
        """The products of each own matrix, transposed, and its left factor."""
        pairs = zip(self.owns, lefts, strict=True)
        return torch.stack([left.t().to(own.dtype) @ own for own, left in pairs]).mT.to(dtype)

    def decode(self, lefts: Tensor, rights: Tensor) -> None:
        """Put the product of each pair of factors where the mean is to stand."""
        for mean, left, right in zip(self.means, lefts, rights, strict=True):
            torch.mm(left.to(mean.dtype), right.t().to(mean.dtype), out=mean)


class _Bucket:
    """A bucket that waits for the last one."""

    def __init__(self, gradient: Tensor, parts: Parts) -> None:
        self.gradient = gradient
        self._parts = parts
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[gradient.device] if gradient.device.type != "cpu" else []
        )

    def matrices(self, error: Tensor) -> list[tuple[Shape, Tensor, Tensor]]:
        """Each matrix: its shape, and its places in the gradient and in the error."""
        return [
            (shape, _matrix(self.gradient, offset, shape), _matrix(error, offset, shape))
            for offset, shape in self._parts.matrices
        ]

    def whole(self, flat: Tensor) -> list[Tensor]:
        """The parts of the gradient, or of its error, that are sent whole."""
        return [flat[offset : offset + size] for offset, size in self._parts.whole]


def _matrix(flat: Tensor, offset: int, shape: Shape) -> Tensor:
    return flat[offset : offset + math.prod(shape)].view(shape)
