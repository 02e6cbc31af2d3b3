"""Measures a worker before plans are estimated: how fast it computes blocks, and exchanges what plans exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from elaunch.trainer import link
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.parallel.block_times import BlockTimes
from elaunch.trainer.parallel.checks import Shape, microbatches
from elaunch.trainer.parallel.estimate import EXCHANGES_OF_BLOCK, WorkerSpeed, estimate, turns_of_pipeline
from elaunch.trainer.parallel.plan import ParallelPlan, Sizes, fit, parse
from elaunch.trainer.parallel.worker_memory import give_back_freed
from elaunch.trainer.ranks.peers import Peers

_MESSAGE_BYTES = 8 << 20
_FLOAT_BYTES = 4
# So many blocks of a network, and micro-batches for each worker of a pipeline: more take longer than they tell.
_BLOCKS_MAX, _MICROBATCHES_MAX = 4, 4


def worker_speed(
    config: TrainConfig, device: torch.device, peers: Peers, plans: Collection[ParallelPlan], *, free: int
) -> WorkerSpeed:
    """The speed of the slowest worker, and of the link as each of `plans` would use it. Collective.

    `free` are the bytes that a worker may take, the same on all. With `--compile` this loads the compiler: it is part
    of the process without a model then.
    """
    link.phase("measuring")
    # The shortest has the fewest micro-batches under way, so it takes the least memory.
    pipeline = min((plan for plan in plans if plan.pp > 1), key=lambda plan: plan.pp, default=parse("ddp"))
    pp = pipeline.pp
    blocks = blocks_to_measure(config.shape, peers.world_size, pp, free, bf16=config.bf16)
    times = BlockTimes(config, device, peers)
    plain_s = {many: times.plain(many) for many in sorted({1, blocks})}
    computed_s = times.plain(blocks, compiled=True) if config.compile else plain_s[blocks]
    clear(compiled=config.compile)
    speed = WorkerSpeed(flops_per_s=blocks * times.operations / computed_s)
    if peers.world_size > 1:
        speed = _with_link(speed, times, device, peers.world_size)
    norm_s = speed.message_s * (peers.world_size > 1)
    update_s_per_byte = max(0.0, times.updated(blocks) - norm_s) / (blocks * times.block_bytes)
    speed = replace(speed, update_s_per_byte=update_s_per_byte)
    if not all(plan.has_ddp for plan in plans):
        sharded_s = max(0.0, times.sharded() - plain_s[1])
        speed = replace(speed, sharded_s_per_byte=sharded_s / times.bytes_sharded)
    divisions = sorted({plan.tp for plan in plans} - {1})
    exchange_s = {str(tp): _exchange_s(times, speed, tp, plain_s[1]) for tp in divisions}
    stage_s, stage_block_s = 0.0, 0.0
    if pp > 1:
        # 1F1B needs one for each worker; GPipe alone may have fewer.
        many = microbatches(pipeline, fit(pipeline, peers.world_size), config.shape)
        stage_s, stage_block_s = _stage_s(times, speed, pp, max(pp, min(many, _MICROBATCHES_MAX * pp)), plain_s)
    clear(compiled=False)
    return replace(speed, exchange_s=exchange_s, stage_s=stage_s, stage_block_s=stage_block_s)


def blocks_to_measure(shape: Shape, workers: int, pp: int, free: int, *, bf16: bool = False) -> int:
    """How many blocks are measured one after the other, also as a stage of a pipeline of `pp`.

    They are as many as each worker has if all share the layers: what fits into the caches of a CPU fits as well in
    training. They are fewer where the `free` bytes do not suffice.
    """
    plan = parse(f"pp={pp}" if pp > 1 else "ddp")

    def needed(blocks: int) -> int:
        few = replace(shape, layers=blocks * pp, global_batch=2 * pp * shape.micro_batch)
        return estimate(plan, Sizes(pp=pp), few, WorkerSpeed(), bf16=bf16).memory.step

    most = min(_BLOCKS_MAX, shape.layers // workers)
    return next((blocks for blocks in range(most, 1, -1) if needed(blocks) <= free), 1)


def clear(*, compiled: bool) -> None:
    """Give back what was freed, and drop what was compiled, which holds parameters."""
    if compiled:
        torch.compiler.reset()
    give_back_freed()


def _with_link(speed: WorkerSpeed, times: BlockTimes, device: torch.device, workers: int) -> WorkerSpeed:
    short, long = (torch.zeros(size // _FLOAT_BYTES, device=device) for size in (_FLOAT_BYTES, _MESSAGE_BYTES))
    short_s, long_s = times.repeated(lambda: dist.all_reduce(short)), times.repeated(lambda: dist.all_reduce(long))
    sent = 2 * (workers - 1) / workers * _MESSAGE_BYTES
    return replace(speed, link_bytes_per_s=sent / max(long_s - short_s, 1e-6), message_s=short_s)


def _exchange_s(times: BlockTimes, speed: WorkerSpeed, tp: int, plain_s: float) -> float:
    """What one exchange of tensor parallel takes."""
    exchanged_s = times.divided(tp) - plain_s / tp - times.summed_s(tp, speed, blocks=1 / tp)
    return max(0.0, exchanged_s) / EXCHANGES_OF_BLOCK


def _stage_s(
    times: BlockTimes, speed: WorkerSpeed, pp: int, many: int, plain_s: Mapping[int, float]
) -> tuple[float, float]:
    """What a stage takes for a micro-batch besides its computation: by itself, and for each of its blocks.

    It is the schedule, FSDP2's hooks and copies, and the messages. What FSDP2 copies once in a step is divided among
    the turns of `many` micro-batches. `plain_s` has the computation, by the number of blocks.
    """
    turns = turns_of_pipeline(pp, many)
    besides_s = {
        blocks: (times.piped(pp, blocks, many) - times.summed_s(pp, speed, blocks=blocks)) / turns - computed_s
        for blocks, computed_s in plain_s.items()
    }
    most = max(besides_s)
    each_s = max(0.0, besides_s[most] - besides_s[1]) / (most - 1) if most > 1 else 0.0
    return max(0.0, besides_s[most] - most * each_s), each_s
