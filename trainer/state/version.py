"""Which state of a training: the one name for it in memories, checkpoints and on the way between ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """Which state: the one after `step`, computed in `generation`. A newer generation's wins over any step."""

    generation: int
    step: int
