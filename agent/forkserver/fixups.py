"""What libraries find out about their process when they are imported, and find out again in each worker.

Lightning and torchmetrics keep the rank as an attribute of their function `rank_zero_only`. Lightning has a log handler
of its own if the program has set up no logging before.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

# pyarrow's allocator would start a thread when it is imported. A user's own value stays.
UNLESS_SET = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


def _lightnings(module: Any) -> int:
    return module._get_rank() or 0


def _torchmetrics(_: object) -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


_RANKS: Mapping[str, Callable[[object], int]] = {
    "lightning.fabric.utilities.rank_zero": _lightnings,
    "lightning_fabric.utilities.rank_zero": _lightnings,
    "torchmetrics.utilities.prints": _torchmetrics,
}
_LOGGERS = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")


def forget(modules: Mapping[str, ModuleType]) -> None:
    """In the fork server: no rank is known, as before the import."""
    for name in _RANKS.keys() & modules.keys():
        # A version that keeps the rank elsewhere has no such attribute.
        with suppress(AttributeError):
            del vars(modules[name])["rank_zero_only"].rank


def find_out_again(modules: Mapping[str, ModuleType]) -> None:
    """In a worker that imports these modules: do what their texts do at an import."""
    for name in [name for name in _RANKS if name in modules]:
        function = vars(modules[name]).get("rank_zero_only")
        if function is not None and not hasattr(function, "rank"):
            function.rank = _RANKS[name](modules[name])
    if sys.modules["logging"].getLogger().hasHandlers():
        for logger in [logging.getLogger(name) for name in _LOGGERS if name in modules]:
            for handler in [each for each in logger.handlers if type(each) is logging.StreamHandler]:
                logger.removeHandler(handler)
                logger.propagate = True
