"""Data parallelism, where each worker computes the whole network: DDP, ZeRO-1, ZeRO-2, FSDP2 and HSDP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.distributed_c10d import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elaunch.trainer.data.order import Micro, Order
from elaunch.trainer.data.sampling import accumulate
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.parallel.plan import DataShare, ParallelPlan

# torch's PowerSGDState starts after 1000 steps, more than a short run has.
POWERSGD_RANK, POWERSGD_START = 1, 10


@dataclass(eq=False)
class Whole:
    """`gpt` is the network, `model` what the loop calls, and `optimizer` has the parameters.

    `model` is DDP around `gpt`, or `gpt` itself where its parameters are sharded.
    """

    plan: ParallelPlan
    share: DataShare
    gpt: GPT
    model: nn.Module
    optimizer: Optimizer
    autocast: torch.autocast

    def micro_batches(self, order: Order, step: int) -> Iterator[list[Micro]]:
        """This worker's micro-batches of a step, each for one call of `backward`."""
        model: Any = self.model
        for micro in accumulate(model, order, step, self.share.rank, self.share.world_size):
            if self.plan.kind == "zero2":
                # Parameters are gathered for the first micro-batch, and resharded after the last one.
                model.set_reshard_after_backward(micro.is_last)
            yield [micro]

    def backward(self, inputs: Tensor, targets: Tensor, micros: Sequence[Micro]) -> Tensor:
        """Accumulate gradients; the last call of a step reduces them over the workers.

        Returns this worker's part of the step's loss: the mean over all workers is the loss.
        """
        with self.autocast:
            loss = self.model(inputs, targets) * micros[0].weight
        loss.backward()
        found: Tensor = loss.detach()
        return found

    def warm_up(self, inputs: Tensor, targets: Tensor, model: nn.Module | None = None) -> None:
        """A pass whose gradients do not count: DDP rebuilds its buckets, and the compiler compiles."""
        with self.autocast:
            loss = (model or self.model)(inputs, targets)
        loss.backward()

    def clip(self, norm_max: float) -> Tensor:
        """Clip the gradients to a total norm of at most `norm_max`. Returns the norm before. Collective."""
        return clip_gradients(self.gpt.parameters(), norm_max)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This worker's part of the mean loss in nats per byte: the parts of a replica's workers add up to it."""
        with self.autocast:
            mean: Tensor = self.gpt(inputs, targets)
        return mean.double()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole network's parameters, by name, one at a time. Collective."""
        for name, value in self.gpt.state_dict().items():
            yield name, full(value)


def in_ddp(
    module: nn.Module,
    device: torch.device,
    *,
    hook: str | None = None,
    bucket_cap_mb: float | None = None,
) -> DistributedDataParallel:
    """The module in DDP on `device`, in the default process group, with buckets of `bucket_cap_mb` MiB.

    `hook` is fp16, bf16 or powersgd: how gradients are compressed.
    """
    if hook == "powersgd":
        # With several buckets torch's hook starts collectives in a different order on each rank, and hangs with gloo.
        bucket_cap_mb = sum(each.numel() * each.element_size() for each in module.parameters()) / (1 << 20) + 1
    model = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # None gives the first bucket its own size.
        bucket_cap_mb=bucket_cap_mb,
    )
    group = model.process_group
    if hook == "powersgd":
        state = PowerSGDState(
            group,
            POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_START,
            # Else a gradient of zeros becomes NaN.
            orthogonalization_epsilon=1e-20,
            batch_tensors_with_same_shape=True,
        )
        model.register_comm_hook(state, powerSGD_hook)
    elif hook is not None:
        model.register_comm_hook(group, {"fp16": fp16_compress_hook, "bf16": _bf16_hook}[hook])
    return model


def hook_state(model: nn.Module) -> PowerSGDState | None:
    """PowerSGD's state across steps, for the Keeper."""
    states = (state for _, state in getattr(model, "_comm_hooks", ()))
    return next((state for state in states if isinstance(state, PowerSGDState)), None)


def _bf16_hook(group: dist.ProcessGroup, bucket):  # type: ignore[no-untyped-def]
    """torch's hook. DDP rejects it by name in a torch without CUDA, although gloo supports bfloat16."""
    return bf16_compress_hook(group, bucket)


def full(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all workers' shards if it is sharded. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    norm_max: float,
    *,
    pipeline: ProcessGroup | None = None,
    twice: Sequence[Tensor] = (),
) -> Tensor:
    """Scale the gradients so that their norm, over all workers' parts of all parameters, is at most `norm_max`.

    Returns the norm before. The workers of `pipeline` have different parameters, except those in `twice`, which the
    first and the last one share. All get the same bits, so copies of a parameter stay identical. Collective.
    """
    own = list(parameters)
    norm = _norm(own)
    if pipeline is not None:
        square = norm.double().square() - (_norm(twice).double().square() / 2 if twice else 0)
        dist.all_reduce(square, group=pipeline)
        norm = square.sqrt().float()
    nn.utils.clip_grads_with_norm_(own, norm_max, norm)
    return norm


def _norm(parameters: Iterable[Tensor]) -> Tensor:
    """The total norm of the gradients. If they are sharded, it is collective over their mesh."""
    return full(nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))
