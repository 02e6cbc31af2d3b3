"""The seconds that a few blocks of the network take on this machine, in the form that each kind of plan gives them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import AdamW

from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.model import GPT, Block
from elaunch.trainer.parallel import gradients
from elaunch.trainer.parallel.checks import Shape
from elaunch.trainer.parallel.estimate import WorkerSpeed, operations_of_position
from elaunch.trainer.parallel.schedules import known
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.tuning.passes import finish_device, slowest_s

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REPEATS = 3
# After so many seconds nothing is repeated again.
_ENOUGH_S = 5.0
_FLOAT_BYTES = 4


class BlockTimes:
    """Blocks forward and backward, for a micro-batch, and what a step does besides. All is collective.

    All workers compute and send at the same time, as they do in training.
    """

    def __init__(self, config: TrainConfig, device: torch.device, peers: Peers) -> None:
        self._shape: Shape = config.shape
        self._bf16, self._device, self._peers = config.bf16, device, peers
        self.block_bytes = _FLOAT_BYTES * sum(each.numel() for each in self._block().parameters())

    @property
    def operations(self) -> float:
        """What the estimate counts for a block."""
        return self._shape.micro_batch * self._shape.context * operations_of_position(1, self._shape, 0)

    @property
    def bytes_sharded(self) -> float:
        """What a worker sends for a block that all workers share: it is gathered twice, and its gradients once."""
        return 3 * (self._peers.world_size - 1) / self._peers.world_size * self.block_bytes

    def plain(self, blocks: int = 1, *, compiled: bool = False) -> float:
        """On each worker by itself: one block after the other."""
        chain = self._chain(blocks)
        if compiled:
            for block in chain:
                block.compile()
        return self._seconds(chain, self._shape.context)

    def sharded(self) -> float:
        """A block with its parameters in shards on all workers."""
        # Imported here, since the import takes long, and a run with a known plan does not measure.
        from torch.distributed.fsdp import fully_shard

        block = self._block()
        fully_shard(block, mesh=self._mesh(fsdp=self._peers.world_size), reshard_after_forward=True)
        return self._seconds(block, self._shape.context)

    def divided(self, tp: int) -> float:
        """A block with its matrices divided among `tp` workers, as `build` does it."""
        from torch.distributed.fsdp import fully_shard

        from elaunch.trainer.parallel.tensor import divide_block

        mesh = self._mesh(dp=self._peers.world_size // tp, fsdp=1, tp=tp)
        block = self._block()
        divide_block(block, mesh["tp"])
        fully_shard(block, mesh=mesh["dp", "fsdp"], reshard_after_forward=True)
        return self._seconds(block, self._shape.context // tp)

    def piped(self, pp: int, blocks: int, many: int) -> float:
        """A stage of so many blocks on each of `pp` workers, as `build` makes it: for `many` micro-batches."""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        from elaunch.trainer.parallel.stages import GptStage, ModelPart

        mesh = self._mesh(pp=pp, dp=self._peers.world_size // pp, fsdp=1)
        shape, number, layers = self._shape, mesh.get_local_rank("pp"), range(blocks)
        gpt = GPT(layers=blocks, heads=shape.heads, width=shape.width, context=shape.context, dropout=0.0)
        inner = {"is_first": False, "is_last": False}
        part = ModelPart(gpt.to(self._device), layers, **inner)
        stage = GptStage(part, layers, **inner, tp=None, device=self._device, bf16=self._bf16)
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
        return self.repeated(lambda: schedule.step(*given, target=target, losses=[], **returns_nothing))

    def updated(self, blocks: int) -> float:
        """The end of a step: the gradients' norm over all workers, and the optimizer."""
        parameters = list(self._chain(blocks).parameters())
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = AdamW(parameters, fused=True)

        def once() -> None:
            gradients.clip(parameters, 1.0)
            optimizer.step()

        return self.repeated(once)

    def summed_s(self, workers: int, speed: WorkerSpeed, *, blocks: float = 1.0) -> float:
        """What replicas of so many workers take to sum the gradients of blocks."""
        replicas = self._peers.world_size // workers
        return speed.sending_s(2 * (replicas - 1) / replicas * self.block_bytes * blocks, int(replicas > 1))

    def repeated(self, do: Callable[[], object]) -> float:
        """The slowest worker's seconds of the fastest turn: other programs only make one slower."""
        times_s: list[float] = []
        while len(times_s) < 2 or (len(times_s) <= _REPEATS and sum(times_s) < _ENOUGH_S):
            self._peers.largest([0])
            begun_s = time.perf_counter()
            do()
            finish_device(self._device)
            times_s.append(slowest_s(time.perf_counter() - begun_s, self._peers))
        return min(times_s[1:])

    def _mesh(self, **axes: int) -> DeviceMesh:
        """All workers, with so many along each axis."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def _chain(self, blocks: int) -> nn.Sequential:
        return nn.Sequential(*(self._block() for _ in range(blocks)))

    def _block(self) -> Block:
        return Block(self._shape.width, self._shape.heads, dropout=0.0).to(self._device)

    def _seconds(self, module: nn.Module, positions: int) -> float:
        # As in a network, whose blocks pass gradients on.
        inputs = torch.randn(
            self._shape.micro_batch, positions, self._shape.width, device=self._device, requires_grad=True
        )

        def once() -> None:
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16):
                outputs = module(inputs)
            outputs.sum().backward()

        return self.repeated(once)
