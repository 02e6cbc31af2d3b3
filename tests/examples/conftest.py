"""Fixtures that tests of examples share with the fault tests."""

from __future__ import annotations

# The process that forks ranks, and the trainings without failures, are the same.
from tests.faults.conftest import _forker as forker  # noqa: F401
from tests.faults.conftest import calm_training  # noqa: F401
