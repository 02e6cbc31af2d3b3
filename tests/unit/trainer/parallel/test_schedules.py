"""Arguments that older versions of torch do not have."""

from __future__ import annotations

from typing import Any

from elaunch.trainer.parallel.schedules import known


def of_torch_2_6(*args: Any, target: Any = None, losses: Any = None, **kwargs: Any) -> None:
    """Its schedules pass what they do not know on to the stages."""


def test_an_argument_that_this_torch_does_not_have_is_left_out() -> None:
    assert known(of_torch_2_6, losses=[], return_outputs=False) == {"losses": []}
