"""What most tests of the core begin with."""

from __future__ import annotations

import pytest

from tests.unit.agent.driver import Driver, started


@pytest.fixture
def driver() -> Driver:
    """A single node whose workers run."""
    return started()
