"""Which parts of saved boxes belong into the boxes that a rank has now."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from elaunch.trainer.checkpoint import layout
from elaunch.trainer.checkpoint.layout import Targets


def cut(dice: random.Random, whole: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Boxes that together are the tensor, and where each lies."""
    boxes = [(whole, (0,) * whole.ndim)]
    for _ in range(dice.randint(0, 5) if whole.ndim else 0):
        part, at = boxes.pop(dice.randrange(len(boxes)))
        axis = dice.randrange(part.ndim)
        size = dice.randint(0, part.shape[axis])
        begin = tuple(place + size * (number == axis) for number, place in enumerate(at))
        boxes += zip(part.split([size, part.shape[axis] - size], axis), (at, begin), strict=True)
    return boxes


@pytest.mark.parametrize("seed", range(20))
def test_any_boxes_are_filled_from_any_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    saved = torch.arange(7.0 * 5 * 3).reshape(dice.choice([(7, 5, 3), (105,), (1, 105)]))
    saved = dice.choice([saved, saved, saved.sum()])
    loaded = torch.zeros_like(saved)
    boxes = cut(dice, loaded)
    monkeypatch.setattr(layout, "local_boxes", lambda _: boxes)

    targets = Targets({"w": loaded})
    for part, at in cut(dice, saved):
        if targets.need("w", at, part.shape):
            targets.fill("w", at, part.clone())

    assert torch.equal(loaded, saved)
    assert not targets.need("another", (0,), (1,))
