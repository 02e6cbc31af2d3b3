"""Carries out a plan: divides the network among the workers, and makes the optimizer of what each has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.optim import AdamW

from elaunch.trainer.gpt.config import ConfigError, TrainConfig
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.parallel.plan import ParallelPlan, Sizes
from elaunch.trainer.parallel.whole import Whole, in_ddp

if TYPE_CHECKING:
    from elaunch.trainer.parallel.divided import Pipeline, TensorParallel

Groups: TypeAlias = Callable[[nn.Module], list[dict[str, object]]]
# What the loop uses. The two other classes are imported when they are needed: a restart waits for imports.
Parallel: TypeAlias = "Whole | TensorParallel | Pipeline"


def build(config: TrainConfig, gpt: GPT, sizes: Sizes, rank: int, device: torch.device, groups: Groups) -> Parallel:
    """Divide `gpt`, which is the same on every worker, as the plan says. Collective.

    `groups` makes AdamW's groups of a module's parameters, with all their options. Raises ConfigError.
    """
    if config.bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no bfloat16; leave --bf16 out")
    if config.compile:
        # Alone, a worker exchanges nothing.
        gpt.compile_in(parts=not config.plan.has_ddp or sizes.share(rank).world_size > 1)
    plan = config.plan
    if plan.divides_model:
        return _divided(config, plan, gpt, sizes, rank, device, groups)
    model, optimizer = _whole(config, gpt, sizes, device, groups)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16)
    return Whole(plan, sizes.share(rank), gpt, model, optimizer, autocast)


def _whole(config: TrainConfig, gpt: GPT, sizes: Sizes, device: torch.device, groups: Groups) -> tuple[nn.Module, Any]:
    """The module whose backward sums gradients over the workers, and the optimizer."""
    plan = config.plan
    if plan.has_ddp:
        # `tune` makes its own.
        model = gpt if config.tune_comm else in_ddp(gpt, device, hook=config.comm_hook, bucket_cap_mb=config.bucket_mb)
        if plan.kind == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return model, ZeroRedundancyOptimizer(groups(gpt), AdamW, fused=True)
        return model, AdamW(groups(gpt), fused=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A mesh of all workers along one axis uses their group, and makes no other.
    if plan.kind == "hsdp":
        mesh = init_device_mesh(device.type, (sizes.dp, sizes.fsdp), mesh_dim_names=("dp", "fsdp"))
    else:
        mesh = init_device_mesh(device.type, (sizes.fsdp,), mesh_dim_names=("fsdp",))
    # ZeRO-2 keeps the gathered parameters until the backward pass has used them.
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": plan.kind != "zero2"}
    for block in gpt.blocks:
        fully_shard(block, **options)
    fully_shard(gpt, **options)
    return gpt, AdamW(groups(gpt), fused=True)


def _divided(
    config: TrainConfig, plan: ParallelPlan, gpt: GPT, sizes: Sizes, rank: int, device: torch.device, groups: Groups
) -> Parallel:
    """This worker's part of a network that several workers compute."""
    # Imported here, since the import takes long, and a restart waits for it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from elaunch.trainer.parallel.divided import GptStage, ModelPart, Pipeline, TensorParallel, divide

    axes = {"pp": sizes.pp, "dp": sizes.dp, "fsdp": sizes.fsdp, "tp": sizes.tp}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    numbers = [mesh.get_local_rank("pp") + turn * plan.pp for turn in range(plan.stages_per_worker)]
    names = {name: parameter.shape for name, parameter in gpt.named_parameters()}
    part = ModelPart(gpt, plan, numbers)
    tp = mesh["tp"] if sizes.tp > 1 else None
    if tp is not None:
        divide(part, tp)
    local = [GptStage(part, plan, number, config.layers, tp=tp, device=device, bf16=config.bf16) for number in numbers]
    # A pipeline computes a stage for many micro-batches in turn: it would gather the parameters for each.
    options: dict[str, Any] = {"mesh": mesh["dp", "fsdp"], "reshard_after_forward": plan.pp == 1}
    for stage in local:
        for block in stage.blocks:
            fully_shard(block, **options)
        fully_shard(stage, **options)
    optimizer = AdamW(groups(part), fused=True)
    kind = TensorParallel if sizes.pp == 1 else Pipeline
    return kind(plan, sizes.share(rank), config.shape, part, local, mesh, optimizer, names, device)
