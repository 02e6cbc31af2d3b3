"""The state of a training: models, optimizers and random generators, as bytes and back; here what names it.

The command line is checked before torch is imported, and that needs the names of checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """The state after `step`, computed in `generation`. A newer generation wins over any step."""

    generation: int
    step: int


class Piece(NamedTuple):
    """What rank `rank` of a group of `world_size` ranks wrote of the state of `version`: its part, or all of it."""

    version: Version
    world_size: int
    rank: int
