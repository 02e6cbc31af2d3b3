"""The model: a decoder-only transformer over bytes, in the shape of GPT-2.

Pre-norm blocks, learned positions, GELU, tied embeddings, and residual projections whose initial weights are divided by
the square root of their number (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; nanoGPT is
the best-known short implementation). Letters in names are a tensor's axes: B batch, T time, W width, V vocabulary, H
heads, D width per head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class Attention(nn.Module):
    """Causal multi-head self-attention.

    The rows of `queries_keys_values` are ordered by head, so tensor parallel can give each worker whole heads.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        batch, time, _ = x_BTW.shape
        # H counts this worker's heads: with tensor parallel some of them.
        qkv = self.queries_keys_values(x_BTW).view(batch, time, -1, 3, self.head_width)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True)
        y_BTW: Tensor = self.project(y_BHTD.transpose(1, 2).reshape(batch, time, -1))
        return y_BTW


class Block(nn.Module):
    """Attention, then a feed-forward layer of four times the width; each adds to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_feed = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTW: Tensor) -> Tensor:
        x_BTW = x_BTW + self.dropout(self.attention(self.norm_attention(x_BTW)))
        fed_BTW = self.project(F.gelu(self.expand(self.norm_feed(x_BTW)), approximate="tanh"))
        y_BTW: Tensor = x_BTW + self.dropout(fed_BTW)
        return y_BTW


class GPT(nn.Module):
    """Bytes in, a distribution over the next byte out."""

    def __init__(self, *, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.embed_byte = nn.Embedding(VOCABULARY, width)
        self.embed_position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self._mean_nats = mean_nats
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("project.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean cross-entropy in nats per byte, a scalar; both arguments are int64, T at most `context`."""
        return self._mean_nats(self._features(inputs_BT), self.embed_byte.weight, targets_BT)

    def compile_in(self, *, parts: bool) -> None:
        """Compile the network: in one graph, or in `parts`, a graph for each block and one for the loss.

        DDP and FSDP overlap communication with the backward pass only between graphs. One graph costs the host less.
        """
        # Under DDP, torch breaks a graph where a bucket ends. Blocks are small enough, and each graph break costs time.
        torch._dynamo.config.optimize_ddp = False
        if not parts:
            self.compile()
            return
        for block in self.blocks:
            # Block by block: equal blocks share one compilation.
            block.compile()
        # Without it the float32 logits, the largest tensor of all, are written and read several times.
        self._mean_nats = torch.compile(mean_nats)

    def _features(self, inputs_BT: Tensor) -> Tensor:
        """The last layer's output: (B, T, W)."""
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTW = self.dropout(self.embed_byte(inputs_BT) + self.embed_position(positions_T))
        for block in self.blocks:
            x_BTW = block(x_BTW)
        features_BTW: Tensor = self.norm(x_BTW)
        return features_BTW


def mean_nats(features_BTW: Tensor, embedding_VW: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean cross-entropy in nats, with the embedding as the last layer's weights."""
    return F.cross_entropy(F.linear(features_BTW, embedding_VW).flatten(0, 1).float(), targets_BT.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
