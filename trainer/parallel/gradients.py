"""The norm of all gradients, whatever part of them a worker has."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def clip(parameters: Iterable[nn.Parameter], norm_max: float, twice: Collection[Tensor] = ()) -> Tensor:
    """Scale the gradients so that their norm, over all workers' parts of all parameters, is at most `norm_max`.

    Returns the norm before. Each part counts once, however many workers have it: a DTensor says so for its mesh, and
    the parameters of `twice` are on two meshes. Each worker gets the same bits, so copies of a parameter stay alike.
    Collective, with one number.
    """
    shards: list[Tensor] = []
    shares: list[float] = []
    for parameter in parameters:
        if parameter.grad is not None:
            shards.append(local(parameter.grad))
            shares.append(1 / (_copies(parameter.grad) * (2 if _is_in(parameter, twice) else 1)))
    # `_foreach_norm` is what torch's own clip_grad_norm_ calls.
    norms = torch.stack([norm.double() for norm in torch._foreach_norm([shard.float() for shard in shards])])
    squares = (norms.square() * torch.tensor(shares, dtype=torch.float64, device=norms.device)).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt().float()
    torch._foreach_mul_(shards, (norm_max / (norm + 1e-6)).clamp(max=1.0))
    return norm


def local(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor, not a copy."""
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found


def _is_in(parameter: nn.Parameter, some: Collection[Tensor]) -> bool:
    # `in` would compare the contents.
    return any(parameter is one for one in some)


def _copies(gradient: Tensor) -> int:
    """How many workers have the same part."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    mesh = gradient.device_mesh
    many = 1
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Replicate):
            many *= mesh.size(dimension)
    return many
