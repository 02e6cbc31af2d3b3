"""Ways to train in which several workers compute one network: tensor parallel, pipelines, and both with data parallel.

The data axes are FSDP2's, as HSDP: `dp` has copies of the shards, of which there are `fsdp`. So a parameter is a
DTensor on one mesh, also where an axis has one worker only: its gradients are summed over the axes where copies are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elaunch.trainer.data.order import Micro, Order, key_of
from elaunch.trainer.data.sampling import accumulate
from elaunch.trainer.gpt.model import VOCABULARY
from elaunch.trainer.parallel.plan import DataShare, ParallelPlan, Shape, layers_of, microbatches, stages
from elaunch.trainer.parallel.stages import IGNORED, GptStage, ModelPart, nats
from elaunch.trainer.parallel.whole import clip_gradients, full


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
        """What has the parameters."""
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
    """All layers on each worker, and of each matrix a part."""

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
                # With both torch need not compute a first micro-batch to find the shapes out.
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
    """Inputs and targets in micro-batches of one size, of which the last may not count.

    A micro-batch that gives all replicas the same number has one window, and comes after the others.
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
