"""The communication hooks that tuning can choose: gradients in 16 bits, and PowerSGD's two small matrices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.ddp.hooks import hook_for
from elaunch.trainer.ddp.options import DdpOptions
from elaunch.trainer.ddp.wrapper import register as register_hook

_RANK = 4
# PowerSGD sends whole gradients in so many passes first: the matrices of early steps have no low rank.
_WHOLE_PASSES = 10
# The least that PowerSGD takes. A trial throws its state away.
_WHOLE_PASSES_IN_TRIAL = 2
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# The attribute of a wrapper that has the hook which tuning has registered. All other hooks are the program's.
_OURS = "_elaunch_tuned_hook"


def of_program(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The hooks, each with its state, that the program has registered itself."""
    ours = ddp.__dict__.get(_OURS)
    return [(hook, state) for hook, state in ddp._comm_hooks if hook is not ours]


def register(ddp: DistributedDataParallel, name: str, *, is_trial: bool) -> Any:
    """Register the hook on a wrapper that has none. Returns its state if a restart must restore that, else None."""
    start = _WHOLE_PASSES_IN_TRIAL if is_trial else _WHOLE_PASSES
    hook = hook_for(DdpOptions(name, powersgd_rank=_RANK, powersgd_start=start), ddp.process_group)
    if hook is None:
        return None
    register_hook(ddp, hook)
    ((ddp.__dict__[_OURS], state),) = ddp._comm_hooks
    return state if name == "powersgd" else None


def works_here(name: str, ddp: DistributedDataParallel) -> bool:
    """Whether the hook can run: the backend sums its type. Collective."""
    if name not in _TYPES:
        return True
    try:
        dist.all_reduce(torch.zeros(1, dtype=_TYPES[name], device=ddp.device), group=ddp.process_group)
    except (RuntimeError, ValueError, TypeError):
        # Every rank refuses the type before anything is sent.
        return False
    return True
