"""Measures a worker before plans are estimated: how fast it computes a block, and exchanges what plans exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import nn

from elaunch.trainer import link
from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.model import GPT, Block
from elaunch.trainer.parallel.checks import Shape
from elaunch.trainer.parallel.estimate import EXCHANGES_OF_BLOCK, WorkerSpeed, turns_of_pipeline
from elaunch.trainer.parallel.plan import ParallelPlan
from elaunch.trainer.parallel.schedules import known
from elaunch.trainer.parallel.worker_memory import give_back_freed
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.tuning.passes import finish_device, slowest_s

_REPEATS = 3
_MESSAGE_BYTES = 8 << 20
_FLOAT_BYTES = 4


def worker_speed(
    config: TrainConfig, device: torch.device, peers: Peers, plans: Collection[ParallelPlan]
) -> WorkerSpeed:
    """The speed of the slowest worker, and of the link as each of `plans` would use it. Collective.

    All workers compute and send at the same time, as they do in training. With `--compile` this loads the compiler: it
    is part of the process without a model then.
    """
    link.phase("measuring")
    measured = _BlockTimes(config, device, peers)
    plain_s = measured.plain()
    block_s = measured.plain(compiled=True) if config.compile else plain_s
    clear(compiled=config.compile)
    flops_per_s = measured.operations / block_s
    if peers.world_size == 1:
        return WorkerSpeed(flops_per_s=flops_per_s)
    short, long = (torch.zeros(size // _FLOAT_BYTES, device=device) for size in (_FLOAT_BYTES, _MESSAGE_BYTES))
    short_s, long_s = (_repeated(lambda sent=sent: dist.all_reduce(sent), device, peers) for sent in (short, long))  # type: ignore[misc]
    sent = 2 * (peers.world_size - 1) / peers.world_size * _MESSAGE_BYTES
    speed = WorkerSpeed(0, flops_per_s, sent / max(long_s - short_s, 1e-6), short_s)
    sharded_s_per_byte, exchange_s, stage_s = 0.0, {}, 0.0
    if not all(plan.has_ddp for plan in plans):
        sharded_s_per_byte = max(0.0, measured.sharded() - plain_s) / measured.bytes_sharded
    for tp in sorted({plan.tp for plan in plans} - {1}):
        exchanged_s = measured.divided(tp) - plain_s / tp - measured.summed_s(tp, speed, part=1 / tp)
        exchange_s[str(tp)] = max(0.0, exchanged_s) / EXCHANGES_OF_BLOCK
    if pipelines := {plan.pp for plan in plans} - {1}:
        # The smallest has the fewest micro-batches under way, so it takes the least memory.
        pp = min(pipelines)
        many = 2 * pp
        turn_s = (measured.piped(pp, many) - measured.summed_s(pp, speed)) / turns_of_pipeline(pp, many)
        # The rest is the schedule, FSDP2's hooks and the messages.
        stage_s = max(0.0, turn_s - plain_s)
    clear(compiled=False)
    return WorkerSpeed(0, flops_per_s, speed.link_bytes_per_s, short_s, sharded_s_per_byte, exchange_s, stage_s)


def clear(*, compiled: bool) -> None:
    """Give back what was freed, and drop what was compiled, which holds parameters."""
    if compiled:
        torch.compiler.reset()
    give_back_freed()


class _BlockTimes:
    """The seconds that one block of the network takes forward and backward, for a micro-batch. All is collective."""

    def __init__(self, config: TrainConfig, device: torch.device, peers: Peers) -> None:
        self._shape: Shape = config.shape
        self._bf16, self._device, self._peers = config.bf16, device, peers
        self._block_bytes = _FLOAT_BYTES * sum(each.numel() for each in self._block().parameters())

    @property
    def operations(self) -> float:
        """What the estimate counts for a block."""
        width, context = self._shape.width, self._shape.context
        return self._shape.micro_batch * context * (6 * 12 * width**2 + 12 * context * width)

    @property
    def bytes_sharded(self) -> float:
        """What a worker sends for a block that all workers share: it is gathered twice, and its gradients once."""
        return 3 * (self._peers.world_size - 1) / self._peers.world_size * self._block_bytes

    def plain(self, *, compiled: bool = False) -> float:
        """On each worker by itself."""
        block = self._block()
        if compiled:
            block.compile()
        return self._seconds(block, self._shape.context)

    def sharded(self) -> float:
        """With its parameters in shards on all workers."""
        # Imported here, since the import takes long, and a run with a known plan does not measure.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self._peers.world_size,), mesh_dim_names=("fsdp",))
        block = self._block()
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
        return self._seconds(block, self._shape.context)

    def divided(self, tp: int) -> float:
        """With its matrices divided among `tp` workers, as `build` does it."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from elaunch.trainer.parallel.tensor import divide_block

        axes = {"dp": self._peers.world_size // tp, "fsdp": 1, "tp": tp}
        mesh = init_device_mesh(self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        block = self._block()
        divide_block(block, mesh["tp"])
        fully_shard(block, mesh=mesh["dp", "fsdp"], reshard_after_forward=True)
        return self._seconds(block, self._shape.context // tp)

    def piped(self, pp: int, many: int) -> float:
        """With a block on each of `pp` workers, as `build` does it: for so many micro-batches."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        from elaunch.trainer.parallel.stages import GptStage, ModelPart

        axes = {"pp": pp, "dp": self._peers.world_size // pp, "fsdp": 1}
        mesh = init_device_mesh(self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        shape, number = self._shape, mesh.get_local_rank("pp")
        gpt = GPT(layers=1, heads=shape.heads, width=shape.width, context=shape.context, dropout=0.0).to(self._device)
        inner = {"is_first": False, "is_last": False}
        stage = GptStage(ModelPart(gpt, [0], **inner), [0], **inner, tp=None, device=self._device, bf16=self._bf16)
        for module in (*stage.blocks, stage):
            fully_shard(module, mesh=mesh["dp", "fsdp"], reshard_after_forward=False)
        positions = (shape.micro_batch, shape.context, shape.width)
        between = torch.empty(*positions, device="meta", requires_grad=True)
        wrapped = PipelineStage(
            stage, number, pp, self._device, input_args=between, output_args=between, group=mesh.get_group("pp")
        )
        unscaled = known(Schedule1F1B, scale_grads=False)
        schedule = Schedule1F1B(wrapped, many, loss_fn=lambda outputs, _: outputs.sum(), **unscaled)
        returns_nothing = known(schedule.step, return_outputs=False)
        inputs = torch.randn(many * positions[0], *positions[1:], device=self._device)
        given, target = [inputs] * (number == 0), inputs if number == pp - 1 else None
        return _repeated(
            lambda: schedule.step(*given, target=target, losses=[], **returns_nothing), self._device, self._peers
        )

    def summed_s(self, workers: int, speed: WorkerSpeed, *, part: float = 1.0) -> float:
        """What replicas of so many workers take to sum the gradients of their part of a block."""
        replicas = self._peers.world_size // workers
        return speed.sending_s(2 * (replicas - 1) / replicas * self._block_bytes * part, int(replicas > 1))

    def _block(self) -> Block:
        return Block(self._shape.width, self._shape.heads, dropout=0.0).to(self._device)

    def _seconds(self, block: nn.Module, positions: int) -> float:
        # As in a network, whose blocks pass gradients on.
        inputs = torch.randn(
            self._shape.micro_batch, positions, self._shape.width, device=self._device, requires_grad=True
        )

        def once() -> None:
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16):
                outputs = block(inputs)
            outputs.sum().backward()

        return _repeated(once, self._device, self._peers)


def _repeated(do: Callable[[], object], device: torch.device, peers: Peers) -> float:
    """The slowest worker's seconds of the fastest turn: other programs only make one slower."""
    times_s = []
    for _ in range(_REPEATS + 1):
        peers.largest([0])
        begun_s = time.perf_counter()
        do()
        finish_device(device)
        times_s.append(slowest_s(time.perf_counter() - begun_s, peers))
    return min(times_s[1:])
