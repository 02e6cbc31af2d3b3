"""What is imported before workers are forked."""

from __future__ import annotations

# What a training script and its optimizers import; torch._dynamo alone is most of a first optimizer step's delay.
DEFAULT_PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
# Packages that a program's text may add: `make ecosystem` runs programs of them.
PACKAGES = frozenset(
    (
        *("accelerate", "datasets", "hydra", "ignite", "lightning", "peft", "pytorch_lightning", "timm"),
        *("torchmetrics", "torchvision", "transformers", "trl"),
    )
)
