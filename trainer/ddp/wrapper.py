"""Wraps a module in DDP with its buckets and its communication hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.ddp.hooks import Hook, hook_for
from elaunch.trainer.ddp.in_order import InOrder
from elaunch.trainer.ddp.options import DdpOptions
from elaunch.trainer.ddp.own_hook import own_hook


def wrap(module: nn.Module, options: DdpOptions, device: torch.device) -> DistributedDataParallel:
    """The module as DDP's, on `device`, in the default process group.

    Raises DdpError if this torch, or the user's hook, cannot do it.
    """
    model = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # None lets the first bucket have a size of its own.
        bucket_cap_mb=options.bucket_mb,
    )
    hook = (
        own_hook(options.hook, model.process_group) if options.is_own_hook else hook_for(options, model.process_group)
    )
    if hook is not None:
        register(model, hook)
    return model


def register(model: DistributedDataParallel, hook: Hook) -> None:
    """Let DDP call `hook` for each bucket.

    With gloo the buckets of a step are exchanged one after the other if the hook starts a collective later: that
    happens in gloo's threads, on each rank in another order, and gloo pairs collectives by their order.
    """
    needs_order = hook.starts_later and dist.get_backend(model.process_group) == "gloo"
    model.register_comm_hook(hook.state, InOrder(hook.function).hook if needs_order else hook.function)


def hook_state(model: nn.Module) -> Any:
    """What the hook of `model` keeps from step to step, for the Keeper; None if it keeps nothing, or has no hook."""
    for _, state in getattr(model, "_comm_hooks", ()):
        if hasattr(state, "state_dict"):
            return state
    return None
