"""The names of the trainer that a program may import."""

from __future__ import annotations

import pytest

from elaunch import trainer


@pytest.mark.parametrize("name", trainer._HOMES)
def test_each_name_of_the_trainer_can_be_imported(name: str) -> None:
    assert getattr(trainer, name).__name__ == name
