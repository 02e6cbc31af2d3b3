"""Ways to train in which several workers compute one network: tensor parallel, pipelines, and both with data parallel.

The data axes are FSDP2's, as HSDP: `dp` has copies of the shards, of which there are `fsdp`. So a parameter is a
DTensor on one mesh, also where an axis has one worker only: its gradients are summed over the axes where copies are.

Tensor parallel is Megatron's with sequence parallel (Shoeybi et al., 2019; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022), by torch.distributed.tensor.parallel. The first matrix of a pair is
divided by its outputs, the second by its inputs. Before the first all workers gather the T positions, and after the
second they sum and scatter them. Between pairs a worker has its T / tp positions only: norms, dropout and the residual
are divided by position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from elaunch.trainer.data.order import Micro, Order, key_of
from elaunch.trainer.data.sampling import accumulate
from elaunch.trainer.gpt.model import GPT, VOCABULARY, Block
from elaunch.trainer.parallel.plan import DataShare, ParallelPlan, Shape, layers_of, microbatches, stages
from elaunch.trainer.parallel.whole import clip_gradients, full

# The ignore_index of cross_entropy: targets of windows that do not count.
IGNORED = -100


class ModelPart(nn.Module):
    """The modules of `gpt` that one worker has. Parameters keep the names that they have in the whole network.

    The byte embedding is on the first stage, and again on the last one, which computes its scores with it.
    """

    def __init__(self, gpt: GPT, plan: ParallelPlan, numbers: Sequence[int]) -> None:
        """`numbers` are those of the worker's stages."""
        super().__init__()
        is_first, is_last = 0 in numbers, stages(plan) - 1 in numbers
        layers = [layer for number in numbers for layer in layers_of(number, plan, len(gpt.blocks))]
        if is_first or is_last:
            self.embed_byte = gpt.embed_byte
        if is_first:
            self.embed_position = gpt.embed_position
        self.dropout = gpt.dropout
        self.blocks = nn.ModuleDict({str(layer): gpt.blocks[layer] for layer in layers})
        if is_last:
            self.norm = gpt.norm


def divide(part: ModelPart, tp: DeviceMesh) -> None:
    """Divide the matrices of all blocks, and make DTensors of all other parameters. Collective in `tp`."""
    for block in part.blocks.values():
        assert isinstance(block, Block)
        divide_block(block, tp)
    if hasattr(part, "norm"):
        parallelize_module(part.norm, tp, SequenceParallel())
    for embedding in (module for module in part.children() if isinstance(module, nn.Embedding)):
        # The same seed has initialized them on all workers.
        whole = DTensor.from_local(embedding.weight.detach(), tp, [Replicate()], run_check=False)
        embedding.weight = nn.Parameter(whole)


def divide_block(block: Block, tp: DeviceMesh) -> None:
    """Divide the matrices of one block. Its input and its output are this worker's slice of the positions."""
    plan: dict[str, ParallelStyle] = {
        "norm_attention": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.queries_keys_values": ColwiseParallel(),
        "attention.project": RowwiseParallel(output_layouts=Shard(1)),
        "norm_feed": SequenceParallel(),
        "expand": ColwiseParallel(input_layouts=Shard(1)),
        "project": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, tp, plan)


class GptStage(nn.Module):
    """Consecutive layers of a part. The first stage takes bytes, and the last one gives scores: (B, T, V).

    Between stages there are activations (B, T, W). With tensor parallel a worker has only its own slice of the T
    positions outside of attention and the feed-forward layers; so a boundary carries a slice too.
    """

    def __init__(
        self,
        part: ModelPart,
        plan: ParallelPlan,
        number: int,
        layers: int,
        *,
        tp: DeviceMesh | None,
        device: torch.device,
        bf16: bool,
    ) -> None:
        """`number` is that of the stage in the pipeline, `layers` that of the network's layers."""
        super().__init__()
        self.number, self.is_first, self.is_last = number, number == 0, number == stages(plan) - 1
        self._tp, self._device_type, self._bf16 = tp, device.type, bf16
        if self.is_first or self.is_last:
            self.embed_byte = part.embed_byte
        if self.is_first:
            self.embed_position, self.dropout = part.embed_position, part.dropout
        self.blocks = nn.ModuleList(part.blocks[str(layer)] for layer in layers_of(number, plan, layers))
        if self.is_last:
            self.norm = part.norm

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (B, T) int64 for the first stage, else (B, T, W)."""
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._bf16):
            if self.is_first:
                x = self._embedded(x)
            for block in self.blocks:
                x = block(x)
            if self.is_last:
                x = F.linear(here(self.norm(x)), shared(self.embed_byte.weight))
            return x

    def _embedded(self, inputs_BT: Tensor) -> Tensor:
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        mine = own_positions(inputs_BT.shape[1], self._tp)
        bytes_BTW = F.embedding(inputs_BT[:, mine], shared(self.embed_byte.weight))
        x_BTW: Tensor = self.dropout(bytes_BTW + F.embedding(positions_T[mine], shared(self.embed_position.weight)))
        return x_BTW


def nats(scores_BTV: Tensor, targets_BT: Tensor, tp: DeviceMesh | None) -> Tensor:
    """The sum of the cross-entropies, in nats, over this worker's positions. `targets_BT` has all positions."""
    mine = targets_BT[:, own_positions(targets_BT.shape[1], tp)]
    scores_NV = scores_BTV.flatten(0, 1).float()
    return F.cross_entropy(scores_NV, mine.flatten(), ignore_index=IGNORED, reduction="sum")


def own_positions(time: int, tp: DeviceMesh | None) -> slice:
    """The positions of which this worker computes what is not divided otherwise."""
    if tp is None:
        return slice(None)
    length = time // tp.size()
    return slice(tp.get_local_rank() * length, (tp.get_local_rank() + 1) * length)


def shared(parameter: Tensor) -> Tensor:
    """A parameter that all workers of a `tp` group have. Each computes other positions: the gradients are summed."""
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter


def here(activation: Tensor) -> Tensor:
    """This worker's slice of an activation."""
    return activation.to_local() if isinstance(activation, DTensor) else activation


@dataclass(eq=False)
class Divided:
    """One model on several workers: `model` has this worker's part of it, and `stages` are its computation.

    `names` are those of the whole network's parameters with their shapes. `mesh` has the axes pp, dp, fsdp and tp.
    """

    plan: ParallelPlan
    share: DataShare
    shape: Shape
    model: ModelPart
    stages: Sequence[GptStage]
    mesh: DeviceMesh
    optimizer: Optimizer
    names: dict[str, torch.Size]
    device: torch.device

    @property
    def gpt(self) -> ModelPart:
        """The module with the parameters."""
        return self.model

    @property
    def _tp(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.plan.tp > 1 else None

    def warm_up(self, inputs: Tensor, targets: Tensor) -> None:
        """Nothing: FSDP2 sums in one order from the first step on."""

    def clip(self, norm_max: float) -> Tensor:
        """Scale the gradients so that the norm of all is at most `norm_max`. Returns the norm before. Collective."""
        pipeline = self.mesh.get_group("pp") if self.plan.pp > 1 else None
        return clip_gradients(self.model.parameters(), norm_max, pipeline=pipeline, twice=self._on_both())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole network's parameters, by name, one at a time. Collective."""
        own = dict(self.model.named_parameters())
        for name, size in self.names.items():
            whole = full(own[name].detach()) if name in own else torch.empty(size, device=self.device)
            if self.plan.pp > 1:
                whole = whole.contiguous()
                dist.broadcast(whole, group=self.mesh.get_group("pp"), group_src=self._holder(name))
            yield name, whole

    def _holder(self, name: str) -> int:
        """The first worker of the pipeline that has a parameter."""
        many = stages(self.plan)
        if name.startswith("blocks."):
            layer = int(name.split(".")[1])
            found = next(n for n in range(many) if layer in layers_of(n, self.plan, self.shape.layers))
        else:
            found = many - 1 if name.startswith("norm.") else 0
        return found % self.plan.pp

    def _on_both(self) -> list[Tensor]:
        """The parameters that the first and the last worker of a pipeline have."""
        return [self.model.embed_byte.weight] if hasattr(self.model, "embed_byte") else []

    def _seed(self, key: int) -> None:
        # Each worker draws for other positions, heads or layers.
        mesh = self.mesh
        torch.manual_seed(key_of(key, mesh.get_local_rank("pp"), mesh.get_local_rank("tp")))


class TensorParallel(Divided):
    """Each worker has all layers, and a part of each matrix."""

    def micro_batches(self, order: Order, step: int) -> Iterator[list[Micro]]:
        """This replica's micro-batches of a step, each to be given to `backward` by itself."""
        (stage,) = self.stages
        for micro in accumulate(stage, order, step, self.share.rank, self.share.world_size):
            self._seed(micro.key)
            yield [micro]

    def backward(self, inputs: Tensor, targets: Tensor, micros: Sequence[Micro]) -> Tensor:
        """Add to the gradients; the last call of a step sums them over the replicas.

        Returns this worker's part of the step's loss: the mean over all workers is the loss.
        """
        part = self._mean(inputs, targets) * micros[0].weight
        part.backward()  # type: ignore[no-untyped-call]
        return part.detach() * self.plan.tp

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This worker's part of the mean loss in nats per byte: the parts of a replica's workers add up to it."""
        return self._mean(inputs, targets).double()

    def _mean(self, inputs: Tensor, targets: Tensor) -> Tensor:
        (stage,) = self.stages
        return nats(stage(inputs), targets, self._tp) / targets.numel()


@dataclass(eq=False)
class Pipeline(Divided):
    """Each worker has some of the layers, and computes them for one micro-batch after the other."""

    def __post_init__(self) -> None:
        plan, shape, mesh = self.plan, self.shape, self.mesh
        self._group = mesh.get_group("pp")
        self._tied = _tied_group(mesh)
        # The mean over all windows of the step, of which each replica has its share; FSDP takes the mean of those.
        self._scale = self.share.world_size / (shape.global_batch * shape.context)
        many = microbatches(self.share.world_size, shape)
        windows, time = shape.micro_batch, shape.context // plan.tp
        between = torch.empty(windows, time, shape.width, device="meta", requires_grad=True)
        given = torch.empty(windows, shape.context, dtype=torch.int64, device="meta")
        scores = torch.empty(windows, time, VOCABULARY, device="meta", requires_grad=True)
        wrapped = [
            PipelineStage(
                stage,
                stage.number,
                stages(plan),
                self.device,
                # With both, torch skips shape inference on a first micro-batch.
                input_args=given if stage.is_first else between,
                output_args=scores if stage.is_last else between,
                group=self._group,
            )
            for stage in self.stages
        ]
        self._schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
        if plan.schedule == "interleaved":
            unscaled = _known(ScheduleInterleaved1F1B, scale_grads=False)
            self._schedule = ScheduleInterleaved1F1B(list(wrapped), many, loss_fn=self._loss_of, **unscaled)
        else:
            kind = ScheduleGPipe if plan.schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(wrapped[0], many, loss_fn=self._loss_of, **_known(kind, scale_grads=False))
        self._returns_nothing = _known(self._schedule.step, return_outputs=False)

    def micro_batches(self, order: Order, step: int) -> Iterator[list[Micro]]:
        """This replica's micro-batches of a step, all to be given to `backward` together."""
        micros = order.parts(step, self.share.rank, self.share.world_size)
        self._seed(micros[0].key)
        yield micros

    def backward(self, inputs: Tensor, targets: Tensor, micros: Sequence[Micro]) -> Tensor:
        """Compute the gradients of the step, and sum them over the replicas.

        Returns this worker's part of the step's loss: the mean over all workers is the loss.
        """
        losses: list[Tensor] = []
        inputs, targets = _without_fillers(inputs, targets, micros, self.shape.micro_batch)
        self._schedule.step(
            *([inputs] if self.stages[0].is_first else []),
            target=targets if self.stages[-1].is_last else None,
            losses=losses,
            **self._returns_nothing,
        )
        self._sum_tied()
        part = torch.stack([each.detach() for each in losses]).sum() if losses else torch.zeros((), device=self.device)
        return part * self.plan.tp * self.plan.pp

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This worker's part of the mean loss in nats per byte: the parts of a replica's workers add up to it.

        One micro-batch goes through the stages; the next one follows as soon as a stage is free.
        """
        between = (len(inputs), inputs.shape[1] // self.plan.tp, self.shape.width)
        x = inputs
        for stage in self.stages:
            if not stage.is_first:
                x = torch.empty(between, device=self.device)
                dist.recv(x, group=self._group, group_src=(stage.number - 1) % self.plan.pp)
            x = stage(x)
            if not stage.is_last:
                dist.send(x.contiguous(), group=self._group, group_dst=(stage.number + 1) % self.plan.pp)
        if self.stages[-1].is_last:
            return (nats(x, targets, self._tp) / targets.numel()).double()
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _loss_of(self, scores: Tensor, targets: Tensor) -> Tensor:
        return nats(scores, targets, self._tp) * self._scale

    def _sum_tied(self) -> None:
        """The byte embedding's gradient: the first stage has that of its inputs, the last one that of the scores."""
        for parameter in self._on_both():
            assert isinstance(parameter.grad, DTensor)
            dist.all_reduce(parameter.grad.to_local(), group=self._tied)


def _known(call: Callable[..., Any], **arguments: object) -> dict[str, Any]:
    """Those of `arguments` that this torch's `call` has.

    Without `scale_grads` a schedule never scales gradients. Without `return_outputs` it always keeps the outputs.
    """
    return {name: value for name, value in arguments.items() if name in inspect.signature(call).parameters}


def _without_fillers(inputs: Tensor, targets: Tensor, micros: Sequence[Micro], size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets in micro-batches of `size`; fillers are not counted.

    A filler, which gives all replicas the same number of micro-batches, has one window, and comes after the others.
    """
    counted = sum(micro.weight > 0 for micro in micros) * size
    missing = len(micros) * size - len(inputs)
    inputs, targets = (torch.cat([rows, rows[-1:].expand(missing, -1)]) for rows in (inputs, targets))
    targets[counted:] = IGNORED
    return inputs, targets


def _tied_group(mesh: DeviceMesh) -> ProcessGroup | None:
    """This worker's group of the first and the last worker of its pipeline. All workers make all groups."""
    if mesh["pp"].size() == 2:
        return mesh.get_group("pp")
    own = None
    ends = mesh.mesh[[0, -1]].flatten(1).T.tolist()
    for pair in ends:
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            own = group
    return own
