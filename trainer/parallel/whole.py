"""Ways to train in which each worker computes the whole network: DDP, ZeRO-1, ZeRO-2, FSDP2 and HSDP."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from elaunch.trainer.data.order import Micro, Order
from elaunch.trainer.data.sampling import accumulate
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.parallel.plan import DataShare, ParallelPlan


class Whole:
    """`gpt` is the network, `model` what the loop calls, and `optimizer` has the parameters.

    `model` is DDP around `gpt`, or `gpt` itself where its parameters are sharded.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        share: DataShare,
        gpt: GPT,
        model: nn.Module,
        optimizer: Optimizer,
        autocast: torch.autocast,
    ) -> None:
        self.gpt, self.model, self.optimizer = gpt, model, optimizer
        self._plan, self._share, self._autocast = plan, share, autocast

    def micro_batches(self, order: Order, step: int) -> Iterator[list[Micro]]:
        """This worker's micro-batches of a step, each to be given to `backward` by itself."""
        model: Any = self.model
        for micro in accumulate(model, order, step, self._share.rank, self._share.world_size):
            if self._plan.kind == "zero2":
                # The parameters are gathered for the first micro-batch, and dropped after the last one.
                model.set_reshard_after_backward(micro.is_last)
            yield [micro]

    def backward(self, inputs: Tensor, targets: Tensor, micros: Sequence[Micro]) -> Tensor:
        """Add to the gradients; the last call of a step sums them over the workers.

        Returns this worker's part of the step's loss: the mean over all workers is the loss.
        """
        with self._autocast:
            loss = self.model(inputs, targets) * micros[0].weight
        loss.backward()
        found: Tensor = loss.detach()
        return found

    def warm_up(self, inputs: Tensor, targets: Tensor) -> None:
        """A pass whose gradients do not count: DDP settles in which order it sums, and the compiler does its work."""
        with self._autocast:
            loss = self.model(inputs, targets)
        loss.backward()

    def clip(self, norm_max: float) -> Tensor:
        """Scale the gradients so that the norm of all is at most `norm_max`. Returns the norm before. Collective."""
        if self.model is self.gpt:
            return clip_gradients(self.gpt.parameters(), norm_max)
        return nn.utils.clip_grad_norm_(self.gpt.parameters(), norm_max)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This worker's part of the mean loss in nats per byte: the parts of a replica's workers add up to it."""
        with self._autocast:
            mean: Tensor = self.gpt(inputs, targets)
        return mean.double()

    def weights(self) -> dict[str, Tensor]:
        """The whole network's parameters, by name. Collective."""
        return {name: full(value) for name, value in self.gpt.state_dict().items()}


def full(tensor: Tensor) -> Tensor:
    """The tensor, put together from all workers' shards where each has only one. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], norm_max: float, twice: Collection[Tensor] = ()) -> Tensor:
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
            # `in` would compare the contents.
            is_twice = any(parameter is one for one in twice)
            shares.append(1 / (_copies(parameter.grad) * (2 if is_twice else 1)))
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
