"""The communication hooks that tuning can choose: gradients in 16 bits, and PowerSGD's two small matrices."""

# Annotations are real here: DDP compares a hook's with torch's classes.
import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

_RANK = 4
# PowerSGD sends whole gradients in so many passes first: the matrices of early steps have no low rank.
_WHOLE_PASSES = 10
# The least that PowerSGD takes. A trial throws its state away.
_WHOLE_PASSES_IN_TRIAL = 2
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


# Functions of their own, by which a rebuild knows them from a program's hook. Under its own name DDP refuses torch's
# bfloat16 hook without NCCL, while gloo sums bfloat16 too.
def sum_in_bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found: torch.futures.Future[torch.Tensor] = default_hooks.bf16_compress_hook(state, bucket)
    return found


def sum_in_fp16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found: torch.futures.Future[torch.Tensor] = default_hooks.fp16_compress_hook(state, bucket)
    return found


def sum_in_low_rank(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    found: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    return found


_OURS = (sum_in_bf16, sum_in_fp16, sum_in_low_rank)


def of_program(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The hooks, each with its state, that the program has registered itself."""
    return [(hook, state) for hook, state in ddp._comm_hooks if hook not in _OURS]


def register(ddp: DistributedDataParallel, name: str, *, is_trial: bool) -> Any:
    """Register the hook on a wrapper that has none. Returns its state if a restart must restore that, else None."""
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            ddp.process_group,
            matrix_approximation_rank=_RANK,
            start_powerSGD_iter=_WHOLE_PASSES_IN_TRIAL if is_trial else _WHOLE_PASSES,
        )
        ddp.register_comm_hook(state, sum_in_low_rank)
        return state
    if name != "none":
        ddp.register_comm_hook(ddp.process_group, sum_in_bf16 if name == "bf16" else sum_in_fp16)
    return None


def works_here(name: str, ddp: DistributedDataParallel) -> bool:
    """Whether the hook can run: the backend sums its type, or numpy is installed. Collective."""
    if name == "powersgd":
        return importlib.util.find_spec("numpy") is not None
    try:
        dist.all_reduce(torch.zeros(1, dtype=_TYPES[name], device=ddp.device), group=ddp.process_group)
    except (RuntimeError, ValueError, TypeError):
        # Every rank refuses the type before anything is sent.
        return False
    return True
