"""A part of the network: the layers that one worker has, the stages in which a pipeline computes them, and the
division of their matrices among the workers of `tp`.

Tensor parallel is Megatron's with sequence parallel (Shoeybi et al., 2019; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022), by torch.distributed.tensor.parallel. The first matrix of a pair is
divided by its outputs, the second by its inputs. Before the first all workers gather the T positions, and after the
second they sum and scatter them. Between pairs a worker has its T / tp positions only: norms, dropout and the residual
are divided by position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elaunch.trainer.gpt.model import GPT, Block
from elaunch.trainer.parallel.plan import ParallelPlan, layers_of, stages

# What cross_entropy leaves out: the targets of windows that do not count.
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
        # The same seed has made them alike on all workers.
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
        """`number` is the stage's in the pipeline; the network has so many `layers`."""
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
