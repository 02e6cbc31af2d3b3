"""The Keeper in a loop with Lightning Fabric: `with keep(model, optimizer, loader) as kept:`."""

from __future__ import annotations

from typing import Any

from elaunch.trainer.integrations import KeptEpochs
from elaunch.trainer.state.tree import several


def keep(
    model: Any, optimizer: Any, loader: Any, scheduler: Any = None, *, accumulate: int = 1, **options: Any
) -> KeptEpochs:
    """Keep what `fabric.setup` and `fabric.setup_dataloaders` returned.

    The loop's `range(epochs)` becomes `kept.epochs(epochs)`. The loop steps after `accumulate` batches, and after the
    last of an epoch. `options` are the Keeper's.
    """

    def set_epoch(epoch: int) -> None:
        # Fabric passes the number of its iterators to the sampler's set_epoch.
        loader._num_iter_calls = epoch

    return KeptEpochs(
        model.module,
        [one.optimizer for one in several(optimizer)],
        scheduler=scheduler,
        outermost=model,
        loader=loader,
        base=loader._dataloader,
        accumulate=accumulate,
        set_epoch=set_epoch,
        **options,
    )
