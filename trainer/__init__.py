"""The bundled trainer; its parts are usable from any training script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaunch.trainer.accumulation import accumulate as accumulate
    from elaunch.trainer.checkpoint import Checkpoints as Checkpoints
    from elaunch.trainer.keeper import Keeper as Keeper
    from elaunch.trainer.keeper import NotDurable as NotDurable
    from elaunch.trainer.ledger import Ledger as Ledger
    from elaunch.trainer.modelstate import restore as restore
    from elaunch.trainer.modelstate import state_of as state_of
    from elaunch.trainer.oldfiles import load_plain as load_plain
    from elaunch.trainer.order import Micro as Micro
    from elaunch.trainer.order import Order as Order
    from elaunch.trainer.sampling import Seeded as Seeded
    from elaunch.trainer.sampling import Stream as Stream
    from elaunch.trainer.sharded import ShardedMemory as ShardedMemory

# Imported when they are asked for: `elaunch.trainer.link` must not cost the import of torch.
_HOMES = {
    "Checkpoints": "checkpoint",
    "Keeper": "keeper",
    "Ledger": "ledger",
    "Micro": "order",
    "NotDurable": "keeper",
    "Order": "order",
    "Seeded": "sampling",
    "ShardedMemory": "sharded",
    "Stream": "sampling",
    "accumulate": "accumulation",
    "load_plain": "oldfiles",
    "restore": "modelstate",
    "state_of": "modelstate",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
