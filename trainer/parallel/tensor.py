"""Tensor parallel with sequence parallel: each matrix of a block is divided among the workers of `tp`.

The scheme is Megatron's (Shoeybi et al., 2019; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022), by torch.distributed.tensor.parallel. The first matrix of a pair is divided by its outputs,
the second by its inputs. Before the first all workers gather the T positions, and after the second they sum and scatter
them. Between pairs a worker has its T / tp positions only: norms, dropout and the residual are divided by position.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elaunch.trainer.gpt.model import Attention, Block
from elaunch.trainer.parallel.stages import ModelPart

# The parameters whose rows are in another order here than in the whole network.
_BY_HEAD = "attention.queries_keys_values."


class HeadsAttention(nn.Module):
    """Attention of this worker's heads. `queries_keys_values` has its rows head by head, so that whole heads divide."""

    def __init__(self, attention: Attention, tp: int) -> None:
        super().__init__()
        self.heads, self.dropout = attention.heads // tp, attention.dropout
        self.queries_keys_values = attention.queries_keys_values
        self.project = attention.project
        for parameter in self.queries_keys_values.parameters():
            parameter.data = _by_head(parameter.data, attention.heads)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """`x_BTW` has all positions."""
        batch, time, _ = x_BTW.shape
        # H are this worker's heads.
        qkv = self.queries_keys_values(x_BTW).view(batch, time, self.heads, 3, -1)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True)
        y_BTW: Tensor = self.project(y_BHTD.transpose(1, 2).reshape(batch, time, -1))
        return y_BTW


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
    block.attention = HeadsAttention(block.attention, tp.size())  # type: ignore[assignment]
    parallelize_module(block, tp, plan)


def in_usual_order(name: str, parameter: Tensor, heads: int) -> Tensor:
    """A whole parameter of that name with its rows as the whole network has them."""
    if _BY_HEAD not in name:
        return parameter
    rows = parameter.reshape(heads, 3, -1, *parameter.shape[1:])
    return rows.transpose(0, 1).flatten(0, 2).contiguous()


def _by_head(parameter: Tensor, heads: int) -> Tensor:
    rows = parameter.reshape(3, heads, -1, *parameter.shape[1:])
    return rows.transpose(0, 1).flatten(0, 2).contiguous()
