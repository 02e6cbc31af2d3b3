"""Fixtures that the fault tests of several files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.environment import DEFAULT_PRELOAD
from tests.faults.keeper_runs import Calm
from tests.faults.trainings import CalmTrainings
from tests.ranks import RankForker, forker
from tests.warm import SharedStart

# The modules that their ranks import.
_MODULES = ("keeper.keeper", "memory.sharded", "checkpoint.filesystem", "train", "parallel.divided")


@pytest.fixture(scope="session", name="forker")
def _forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankForker]:
    """The process that forks ranks for all files and all processes of a test run."""
    with forker(shared(tmp_path_factory) / "forker", *(f"elaunch.trainer.{name}" for name in _MODULES), "s3fs") as held:
        yield held


@pytest.fixture(scope="session")
def calm(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The keeper's trainings without failures. A run of the tests makes each of them once."""
    return Calm(forker, shared(tmp_path_factory) / "calm-keepers")


@pytest.fixture(scope="session")
def calm_training(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> CalmTrainings:
    """The trainings of the bundled trainer without failures."""
    return CalmTrainings(forker, shared(tmp_path_factory) / "calm-trainings")


@pytest.fixture(scope="session")
def torch_start() -> SharedStart:
    """A start with torch, without what its optimizers import."""
    return SharedStart.of("torch", "torch.distributed")


@pytest.fixture(scope="session")
def keeper_start() -> SharedStart:
    """A start with the Keeper and all of torch that it and the optimizers import."""
    return SharedStart.of(*DEFAULT_PRELOAD, "elaunch.trainer.keeper.keeper")


def shared(factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
