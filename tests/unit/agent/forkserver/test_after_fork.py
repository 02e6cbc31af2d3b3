"""What Lightning and torchmetrics find out at their import is each worker's own."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest

from elaunch.agent.forkserver import after_fork

# As lightning.fabric.utilities.rank_zero and torchmetrics.utilities.prints do it.
LIGHTNING = """
import os
def _get_rank(): return int(os.environ["RANK"]) if "RANK" in os.environ else None
def rank_zero_only(): pass
rank_zero_only.rank = getattr(rank_zero_only, "rank", _get_rank() or 0)
"""
TORCHMETRICS = """
import os
def rank_zero_only(): pass
rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get("LOCAL_RANK", 0)))
"""


def module(name: str, text: str) -> ModuleType:
    made = ModuleType(name)
    exec(text, vars(made))
    return made


def test_a_worker_knows_its_own_rank_in_modules_that_the_fork_server_has_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {"lightning.fabric.utilities.rank_zero": LIGHTNING, "torchmetrics.utilities.prints": TORCHMETRICS}
    modules = {name: module(name, text) for name, text in texts.items()}
    functions = [vars(each)["rank_zero_only"] for each in modules.values()]

    after_fork.forget_ranks(modules)
    forgotten = [hasattr(each, "rank") for each in functions]
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    after_fork.find_ranks(modules)

    assert forgotten == [False, False]
    assert [each.rank for each in functions] == [5, 1]


@pytest.mark.parametrize("is_set_up", [True, False])
def test_lightnings_own_log_handler_is_for_programs_that_have_set_up_no_logging(
    monkeypatch: pytest.MonkeyPatch, is_set_up: bool
) -> None:
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] if is_set_up else [])

    after_fork.find_ranks({"lightning.pytorch": ModuleType("lightning.pytorch")})

    assert (len(logger.handlers), logger.propagate) == ((0, True) if is_set_up else (1, False))
