"""Gives a DDP wrapper other buckets and another hook in place, at any moment between two passes.

The wrapper stays the same object round the same module: hooks on both, a Keeper, and whoever else refers to them are
not affected. No parameter, buffer or gradient changes, and nothing is sent.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.ddp.hooks import POWERSGD_START, hook_state, register
from elaunch.trainer.tuning.search import CommSettings

_MB = 1 << 20
_POWERSGD_RANK = 4
# The fewest whole passes that PowerSGD takes. A trial discards its state.
_WHOLE_PASSES_IN_TRIAL = 2
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# The attribute of a wrapper that has the hook which tuning has registered. All other hooks are the program's.
_OURS = "_elaunch_tuned_hook"
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
    *("skip_all_reduce_unused_params", "batched_grad_copy"),
)


def wrapper_in(model: nn.Module) -> DistributedDataParallel | None:
    """The model's one DDP wrapper, None if it has none. Raises ValueError if it has several."""
    found = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} DistributedDataParallel in one model cannot be tuned together; give one of them"
        )
    return found[0] if found else None


def settings_of(ddp: DistributedDataParallel) -> CommSettings:
    """Its present settings. A hook of the program's own counts as none."""
    size = None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / _MB
    return CommSettings(size, bool(ddp.gradient_as_bucket_view))


def given_by_program(ddp: DistributedDataParallel) -> frozenset[str]:
    """The settings that the program has chosen itself, as far as that can be seen."""
    given = {
        "bucket_mb": not ddp.bucket_bytes_cap_default,
        # Without views each gradient would be in memory twice.
        "bucket_view": ddp.gradient_as_bucket_view,
        "hook": bool(_hooks_of_program(ddp)),
    }
    return frozenset(name for name, is_given in given.items() if is_given)


def obstacle(model: nn.Module, ddp: DistributedDataParallel) -> str:
    """Why this wrapper's buckets must stay as they are; "" if they need not."""
    own = _hooks_of_program(ddp)
    is_stateful = any(not isinstance(state, dist.ProcessGroup | None) for _, state in own)
    built_in = not ddp._comm_hooks and ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters())
    compiled = [each for each in (model, ddp) if getattr(each, "_compiled_call_impl", None) is not None]
    found = {
        "its communication hook has a state that belongs to its buckets": is_stateful or len(own) > 1,
        f"it has torch's built-in hook {built_in}": bool(built_in),
        "it has a list of bucket sizes": bool(getattr(ddp, "bucket_bytes_cap_list", ())),
        "it has mixed_precision": getattr(ddp, "mixed_precision", None) is not None,
        "all-reduces of some parameters are delayed": bool(getattr(ddp, "_delay_all_reduce_params", None)),
        "optimizers run in its backward pass": in_backward,
        "torch.compile has its reducer": bool(getattr(ddp, "_use_python_reducer", False)),
        "it is compiled as a whole; compile the module inside instead": bool(compiled) or hasattr(model, "_orig_mod"),
    }
    return next((why for why, is_so in found.items() if is_so), "")


def works_here(hook: str, ddp: DistributedDataParallel) -> bool:
    """Whether the hook can run: the backend sums its type. Collective."""
    if hook not in _TYPES:
        return True
    try:
        dist.all_reduce(torch.zeros(1, dtype=_TYPES[hook], device=ddp.device), group=ddp.process_group)
    except (RuntimeError, ValueError, TypeError):
        # Every rank refuses the type before anything is sent.
        return False
    return True


def apply(ddp: DistributedDataParallel, settings: CommSettings, *, is_trial: bool = False) -> Any:
    """Rebuild its reducer with these settings, as all ranks do. Returns the hook's state if a restart must restore it.

    Call it when no pass has begun. A hook of the program's own stays. A trial's hook compresses from the first pass.
    """
    own_hooks = _hooks_of_program(ddp)
    arguments = _arguments(ddp)
    # The old reducer's buckets are as large as all gradients. It also takes its hooks off the parameters as it goes.
    for name in ("logger", "reducer"):
        ddp.__dict__.pop(name)
    fresh = DistributedDataParallel(
        ddp.module,
        **arguments,
        bucket_cap_mb=settings.bucket_mb,
        gradient_as_bucket_view=settings.bucket_view,
    )
    ddp.__dict__.update({name: value for name, value in fresh.__dict__.items() if name not in _KEPT})
    for hook, state in own_hooks:
        ddp.register_comm_hook(state, hook)
    if own_hooks or not settings.is_lossy:
        return None
    start = _WHOLE_PASSES_IN_TRIAL if is_trial else POWERSGD_START
    register(ddp, settings.hook, powersgd_rank=_POWERSGD_RANK, powersgd_start=start)
    ((ddp.__dict__[_OURS], _),) = ddp._comm_hooks
    return hook_state(ddp)


def _hooks_of_program(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The hooks, each with its state, that the program has registered itself."""
    ours = ddp.__dict__.get(_OURS)
    return [(hook, state) for hook, state in ddp._comm_hooks if hook is not ours]


def _arguments(ddp: DistributedDataParallel) -> dict[str, Any]:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    found = {name: getattr(ddp, name) for name in _ARGUMENTS if name in known and hasattr(ddp, name)}
    # The ranks have the same parameters already. Sending them would take longer than the passes that are measured.
    found["init_sync"] = False
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    found[sync] = ddp.broadcast_buffers
    return found
