"""Gives a DDP wrapper buckets of another size in place, at any moment between two passes.

The wrapper stays the same object round the same module: hooks on both, a Keeper, and whoever else refers to them are
not affected. No parameter, buffer or gradient changes, and nothing is sent.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.tuning.search import Size

# What the wrapper has from elsewhere than its constructor's arguments, or what its passes have made of it.
_KEPT = frozenset(
    (
        *nn.Module().__dict__,
        *("module", "process_group", "device_mesh", "require_backward_grad_sync", "require_forward_param_sync"),
        *("_join_config", "_divide_by_initial_world_size"),
    )
)
# Arguments of the constructor that the wrapper has as attributes of the same names. Not every release has all of them.
_ARGUMENTS = (
    *("device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "static_graph"),
    *("gradient_as_bucket_view", "skip_all_reduce_unused_params", "batched_grad_copy"),
)


def wrapper_in(model: nn.Module) -> DistributedDataParallel | None:
    """The model's one DDP wrapper, None if it has none. Raises ValueError if it has several."""
    found = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} DistributedDataParallel in one model cannot be tuned together; give one of them"
        )
    return found[0] if found else None


def obstacle(model: nn.Module, ddp: DistributedDataParallel) -> str:
    """Why this wrapper's buckets must stay as they are; "" if they need not."""
    is_stateful = any(not isinstance(state, dist.ProcessGroup | None) for _, state in ddp._comm_hooks)
    built_in = not ddp._comm_hooks and ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters())
    compiled = [each for each in (model, ddp) if getattr(each, "_compiled_call_impl", None) is not None]
    found = {
        "the program has chosen their size": not ddp.bucket_bytes_cap_default,
        "its communication hook has a state that belongs to its buckets": is_stateful or len(ddp._comm_hooks) > 1,
        f"it has torch's built-in hook {built_in}": bool(built_in),
        "it has mixed_precision": getattr(ddp, "mixed_precision", None) is not None,
        "all-reduces of some parameters are delayed": bool(getattr(ddp, "_delay_all_reduce_params", None)),
        "optimizers run in its backward pass": in_backward,
        "torch.compile has its reducer": bool(getattr(ddp, "_use_python_reducer", False)),
        "it is compiled as a whole; compile the module inside instead": bool(compiled) or hasattr(model, "_orig_mod"),
    }
    return next((why for why, is_so in found.items() if is_so), "")


def apply(ddp: DistributedDataParallel, bucket_mb: Size) -> None:
    """Rebuild its reducer with buckets of this size, as all ranks do. Hooks stay. Call it when no pass has begun."""
    hooks, arguments = [*ddp._comm_hooks], _arguments(ddp)
    # The old reducer's buckets are as large as all gradients. It also takes its hooks off the parameters as it goes.
    for name in ("logger", "reducer"):
        ddp.__dict__.pop(name)
    fresh = DistributedDataParallel(ddp.module, **arguments, bucket_cap_mb=bucket_mb)
    ddp.__dict__.update({name: value for name, value in fresh.__dict__.items() if name not in _KEPT})
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


def _arguments(ddp: DistributedDataParallel) -> dict[str, Any]:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    found = {name: getattr(ddp, name) for name in _ARGUMENTS if name in known and hasattr(ddp, name)}
    # The ranks have the same parameters already. Sending them would take longer than the passes that are measured.
    found["init_sync"] = False
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    found[sync] = ddp.broadcast_buffers
    return found
