"""The Keeper in a loop with Hugging Face Accelerate: `with keep(accelerator, model, optimizer, loader) as kept:`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from elaunch.trainer.integrations import KeptEpochs
from elaunch.trainer.state.tree import several


def keep(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any = None, **options: Any
) -> KeptEpochs:
    """Keep what `accelerator.prepare` returned; the loop's `range(epochs)` becomes `kept.epochs(epochs)`.

    `optimizer` and `scheduler` may be lists. `options` are the Keeper's. Raises ValueError with fp16, whose GradScaler
    skips steps.
    """

    def set_epoch(epoch: int) -> None:
        loader.iteration = epoch

    optimizers, schedulers = several(optimizer), several(scheduler)
    return KeptEpochs(
        model,
        [getattr(one, "optimizer", one) for one in optimizers],
        scheduler=[getattr(one, "scheduler", one) for one in schedulers] or None,
        scaler=accelerator.scaler,
        outermost=model,
        loader=loader,
        base=getattr(loader, "base_dataloader", loader),
        accumulate=accelerator.gradient_accumulation_steps,
        set_epoch=set_epoch,
        **options,
    )
