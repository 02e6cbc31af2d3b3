"""A part of the network: the layers that one worker has, and the stages in which a pipeline computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from elaunch.trainer.gpt.model import GPT

# What cross_entropy leaves out: the targets of windows that do not count.
IGNORED = -100


class ModelPart(nn.Module):
    """The modules of `gpt` that one worker has. Parameters keep the names that they have in the whole network.

    The byte embedding is on the first stage, and again on the last one, which computes its scores with it.
    """

    def __init__(self, gpt: GPT, layers: Sequence[int], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        if is_first or is_last:
            self.embed_byte = gpt.embed_byte
        if is_first:
            self.embed_position = gpt.embed_position
        self.dropout = gpt.dropout
        self.blocks = nn.ModuleDict({str(layer): gpt.blocks[layer] for layer in layers})
        if is_last:
            self.norm = gpt.norm


class GptStage(nn.Module):
    """Consecutive layers of a part. The first stage takes bytes, and the last one gives scores: (B, T, V).

    Between stages there are activations (B, T, W). With tensor parallel a worker has only its own slice of the T
    positions outside of attention and the feed-forward layers; so a boundary carries a slice too.
    """

    def __init__(
        self,
        part: ModelPart,
        layers: Sequence[int],
        *,
        is_first: bool,
        is_last: bool,
        tp: DeviceMesh | None,
        device: torch.device,
        bf16: bool,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self._tp, self._device_type, self._bf16 = tp, device.type, bf16
        if is_first or is_last:
            self.embed_byte = part.embed_byte
        if is_first:
            self.embed_position, self.dropout = part.embed_position, part.dropout
        self.blocks = nn.ModuleList(part.blocks[str(layer)] for layer in layers)
        if is_last:
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
