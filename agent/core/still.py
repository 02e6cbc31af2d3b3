"""What an agent remembers of a standstill of its workers. The rules are in `standstill`, which no start needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaunch.agent.core.stack_groups import Stack
    from elaunch.agent.core.standstill import Sort
    from elaunch.rendezvous.rules.hang_records import StillNode


@dataclass(frozen=True)
class Standstill:
    """This generation's workers as their agent sees them from outside.

    Those of `live` ran at the last look. `still` says how each rank stands still and for how many seconds; `spell_s` is
    for how long all of them do. Stacks were taken in `looks` looks of this standstill; `stacks` are the last ones, and
    ranks in `held_gil` held the GIL in all of them. `told` is this node's record in the store. `healed_s` is the
    longest standstill that ended by itself. `said` is the verdict that the log has.
    """

    live: frozenset[int] = frozenset()
    still: Mapping[int, tuple[Sort, float]] = field(default_factory=dict)
    spell_s: float = 0.0
    looks: int = 0
    is_looking: bool = False
    stacks: tuple[Stack, ...] = ()
    held_gil: frozenset[int] = frozenset()
    told: StillNode | None = None
    healed_s: float = 0.0
    said: str = ""
