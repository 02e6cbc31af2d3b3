"""What the fault tests of several files share."""

from __future__ import annotations

import os

import pytest

from tests.faults.keeper_runs import Calm


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The keeper's trainings that nothing happened to; a run of the tests makes each of them once."""
    base = tmp_path_factory.getbasetemp()
    return Calm((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "calm-keepers")
