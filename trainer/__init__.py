"""The bundled trainer; its parts are usable from any training script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaunch.trainer.checkpoint.checkpoints import Checkpoints as Checkpoints
    from elaunch.trainer.data.batches import Batches as Batches
    from elaunch.trainer.data.order import Micro as Micro
    from elaunch.trainer.data.order import Order as Order
    from elaunch.trainer.data.sampling import Seeded as Seeded
    from elaunch.trainer.data.sampling import accumulate as accumulate
    from elaunch.trainer.keeper.disk_copies import NotDurable as NotDurable
    from elaunch.trainer.keeper.keeper import Keeper as Keeper
    from elaunch.trainer.keeper.verification import Differs as Differs
    from elaunch.trainer.ledger.ledger import Ledger as Ledger
    from elaunch.trainer.memory.sharded import ShardedMemory as ShardedMemory
    from elaunch.trainer.profiling.profiler import profiled as profiled
    from elaunch.trainer.ranks.group_status import BrokenGroup as BrokenGroup
    from elaunch.trainer.state.model_state import restore as restore
    from elaunch.trainer.state.model_state import state_of as state_of
    from elaunch.trainer.tuning import tune as tune

# Each is imported when it is first used: `elaunch.trainer.link` must not import torch.
_HOMES = {
    "Batches": "data.batches",
    "BrokenGroup": "ranks.group_status",
    "Checkpoints": "checkpoint.checkpoints",
    "Differs": "keeper.verification",
    "Keeper": "keeper.keeper",
    "Ledger": "ledger.ledger",
    "Micro": "data.order",
    "NotDurable": "keeper.disk_copies",
    "Order": "data.order",
    "Seeded": "data.sampling",
    "ShardedMemory": "memory.sharded",
    "accumulate": "data.sampling",
    "profiled": "profiling.profiler",
    "restore": "state.model_state",
    "state_of": "state.model_state",
    "tune": "tuning",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
