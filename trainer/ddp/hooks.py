"""Communication hooks by their names: torch's own, and ours where torch's is coarse or broken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from elaunch.trainer.ddp.options import RANK, START, DdpOptions
from elaunch.trainer.ddp.powersgd import PowerSgd, parts_as_square, parts_by_tensor, powersgd_hook
from elaunch.trainer.ddp.quantised import Quantised


@dataclass(frozen=True)
class Hook:
    """A communication hook of DDP, and what it gets as its first argument: its state, or the process group.

    `starts_later` says whether it may start a collective after it has returned.
    """

    state: Any
    function: Callable[..., Any]
    starts_later: bool = True


def hook_for(options: DdpOptions, group: dist.ProcessGroup) -> Hook | None:
    """The hook that `options` name; None if DDP is to exchange gradients itself."""
    match options.hook:
        case "none":
            return None
        case "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            return Hook(group, fp16_compress_hook, starts_later=False)
        case "bf16":
            return Hook(group, _bf16_hook, starts_later=False)
        case "quantised":
            return Hook(group, Quantised().hook, starts_later=False)
        case "powersgd" | "batched-powersgd":
            divide = parts_as_square if options.hook == "batched-powersgd" else parts_by_tensor
            state = PowerSgd(group, options.powersgd_rank or RANK, options.powersgd_start or START, divide)
            return Hook(state, powersgd_hook, starts_later=False)
        case _:
            raise ValueError(f"{options.hook} is no hook of elaunch's")


def _bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook. DDP refuses it by its name in a torch without CUDA, although gloo can add bfloat16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(group, bucket)
