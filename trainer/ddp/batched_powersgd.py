"""PowerSGD that takes a whole bucket for one square matrix: fewest bytes, and least computing.

The method is that of torch's `batched_powerSGD_hook` (Vogels et al., "PowerSGD", 2019), which since torch 1.12 raises
AssertionError as soon as it compresses: its `_orthogonalize` expects a batch of matrices and gets one matrix. The state
is torch's too, so the Keeper keeps it as that of the other hook.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


def batched_powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of all ranks' gradients as P Qᵀ; what that leaves out of a rank's own gradient is added to its next."""
    # After an exchange all ranks have the same P and Q, so their results are equal to the bit.
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
        return allreduce_hook(state.process_group, bucket)
    gradient, index = bucket.buffer(), bucket.index()
    if index in state.error_dict:
        gradient.add_(state.error_dict[index])
    side = math.ceil(math.sqrt(gradient.numel()))
    matrix = gradient.new_zeros(side, side)
    matrix.view(-1)[: gradient.numel()] = gradient
    factor = state.q_memory_dict.get(index)
    q = _orthogonal(_random(state, side, matrix) if factor is None else factor)
    reduced_p = dist.all_reduce(matrix @ q, group=state.process_group, async_op=True).get_future()
    p: list[Tensor] = []

    def begin_q(done: torch.futures.Future[Any]) -> Tensor:
        p.append(_orthogonal(done.value()[0]))
        reduced_q = dist.all_reduce(matrix.t() @ p[0], group=state.process_group, async_op=True).get_future()
        total: Tensor = reduced_q.wait()[0]
        return total

    def rebuild(done: torch.futures.Future[Tensor]) -> Tensor:
        mean_q = done.value() / state.process_group.size()
        state.q_memory_dict[index] = mean_q
        mean = (p[0] @ mean_q.t()).view(-1)[: gradient.numel()]
        state.error_dict[index] = gradient - mean
        state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
        total: Tensor = gradient.copy_(mean)
        return total

    result: torch.futures.Future[Tensor] = reduced_p.then(begin_q).then(rebuild)
    return result


def _random(state: PowerSGDState, side: int, like: Tensor) -> Tensor:
    """The first factor. All ranks draw the same, and leave the generators of the training alone."""
    source = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    rank = min(state.matrix_approximation_rank, side)
    return torch.randn(side, rank, generator=source).to(like)


def _orthogonal(matrix: Tensor) -> Tensor:
    # There is no QR factorisation in half precision.
    factors: Any = torch.linalg.qr(matrix.float())
    orthogonal: Tensor = factors.Q.to(matrix.dtype)
    return orthogonal
