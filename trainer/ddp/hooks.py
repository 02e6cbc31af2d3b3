"""DistributedDataParallel with its buckets and a communication hook: gradients in 16 bits, or PowerSGD's factors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.ddp.powersgd import PowerSgd, powersgd_hook

# torch's PowerSGDState starts after 1000 steps, more than a short run has.
POWERSGD_RANK, POWERSGD_START = 1, 10


def wrap(
    module: nn.Module,
    device: torch.device,
    *,
    hook: str | None = None,
    powersgd_rank: int | None = None,
    bucket_mb: float | None = None,
) -> DistributedDataParallel:
    """The module in DDP on `device`, in the default process group. `hook` and `powersgd_rank` are as for `register`."""
    model = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # None lets the first bucket have a size of its own.
        bucket_cap_mb=bucket_mb,
    )
    if hook is not None:
        register(model, hook, powersgd_rank=powersgd_rank)
    return model


def register(
    model: DistributedDataParallel, hook: str, *, powersgd_rank: int | None = None, powersgd_start: int = POWERSGD_START
) -> None:
    """Register the hook of that name: fp16, bf16 or powersgd. Raises KeyError for another name.

    `powersgd_start` is the number of steps that exchange whole gradients before PowerSGD begins.
    """
    group = model.process_group
    if hook == "powersgd":
        model.register_comm_hook(PowerSgd(group, powersgd_rank or POWERSGD_RANK, powersgd_start), powersgd_hook)
    else:
        model.register_comm_hook(group, {"fp16": fp16_compress_hook, "bf16": _bf16_hook}[hook])


def hook_state(model: nn.Module) -> Any:
    """What the hook of `model` keeps from step to step, for the Keeper; None if it keeps nothing, or has no hook."""
    for _, state in getattr(model, "_comm_hooks", ()):
        if hasattr(state, "state_dict"):
            return state
    return None


def _bf16_hook(group: dist.ProcessGroup, bucket):  # type: ignore[no-untyped-def]
    """torch's hook. DDP refuses it by its name in a torch without CUDA, although gloo can add bfloat16."""
    return bf16_compress_hook(group, bucket)
