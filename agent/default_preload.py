"""The modules that workers get preloaded when the user names none. A worker imports this before its program."""

from __future__ import annotations

# What a training script and its optimizers import; torch._dynamo alone is most of a first optimizer step's delay.
DEFAULT_PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
