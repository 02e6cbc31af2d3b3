"""For which share of the time each rank waits in collectives, by looks once a second; pure.

A share needs no clock that other hosts have too, so ranks of different nodes can be compared by it: a rank that waits
less than all others is the one that they wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elaunch.agent.core.collectives import Count, Counts

# Four minutes. With so few looks as in one minute, two healthy ranks that wait for half of the time would often differ
# by a tenth.
LOOKS = 240
# Ranks that enter nothing for so many looks do something else: an evaluation, a checkpoint, a compilation.
_PAUSE_LOOKS = 12
# torch's recorder of the collectives on a CPU is the first one, and each recorder's default group, too.
_CPU, _DEFAULT_GROUP = 0, 0


@dataclass(frozen=True)
class WaitShares:
    """A window that has had `looks` looks; each rank waited at those in `waited`. `counts` are those of the last look.

    At the last `paused` looks no rank had entered another collective.
    """

    looks: int = 0
    counts: Mapping[int, Count] = field(default_factory=dict)
    waited: Mapping[int, int] = field(default_factory=dict)
    paused: int = 0

    def after(self, counts: Mapping[int, Counts]) -> tuple[WaitShares, Mapping[int, float] | None]:
        """The state after another look at all ranks, and each rank's share at the end of a window."""
        known = {rank: count for rank, each in counts.items() if (count := _default_group(each)) is not None}
        if len(known) < len(counts) or known.keys() != self.counts.keys():
            return WaitShares(counts=known), None
        has_moved = any(count.entered != self.counts[rank].entered for rank, count in known.items())
        paused = 0 if has_moved else self.paused + 1
        if paused > _PAUSE_LOOKS:
            return WaitShares(counts=known), None
        waited = {rank: self.waited.get(rank, 0) + _waits(count) for rank, count in known.items()}
        state = replace(self, looks=self.looks + 1, counts=known, waited=waited, paused=paused)
        if state.looks < LOOKS:
            return state, None
        return WaitShares(counts=known), {rank: looks / LOOKS for rank, looks in waited.items()}


def _default_group(counts: Counts) -> Count | None:
    """The count of the default group; None where it does not tell when the rank waits.

    A GPU's collectives are entered long before the GPU comes to them: only their begin tells when it waits.
    """
    for (recorder, group), count in counts.items():
        if group == _DEFAULT_GROUP and count.entered > 0 and count.ended >= 0:
            return count if recorder == _CPU or count.begun >= 0 else None
    return None


def _waits(count: Count) -> bool:
    return count.ended < (count.begun if count.begun >= 0 else count.entered)
