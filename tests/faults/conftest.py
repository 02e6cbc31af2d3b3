"""What the fault tests of several files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.keeper_runs import Calm
from tests.faults.trainings import CalmTrainings


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The keeper's trainings that nothing happened to; a run of the tests makes each of them once."""
    return Calm(shared(tmp_path_factory) / "calm-keepers")


@pytest.fixture(scope="session")
def calm_training(tmp_path_factory: pytest.TempPathFactory) -> CalmTrainings:
    """The same of the bundled trainer."""
    return CalmTrainings(shared(tmp_path_factory) / "calm-trainings")


def shared(factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes of a run of the tests."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
