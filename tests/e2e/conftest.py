"""Fixtures that the end-to-end tests of several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# These are the same for these tests and the fault tests.
from tests.faults.conftest import _forker as forker  # noqa: F401
from tests.faults.conftest import keeper_start, torch_start  # noqa: F401
from tests.standin import WITHOUT_TORCH


@pytest.fixture(scope="module")
def without_torch() -> Iterator[None]:
    """Jobs of this module find a stand-in for torch. A worker store imports torch after a second, even unused.

    A job that needs torch itself gets `WITH_TORCH` as its environment.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name, value in WITHOUT_TORCH.items():
            patched.setenv(name, value)
        yield
