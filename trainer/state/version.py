"""The version of a training's state, in memories, in checkpoints and between ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """The state after `step`, computed in `generation`. A newer generation wins over any step."""

    generation: int
    step: int
