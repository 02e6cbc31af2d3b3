"""When workers that have reported before report nothing any more, and what is said of it; pure.

Ranks of a job wait for each other: one that hangs silences all. So the workers of a node hang when none of them reports
anything for `hang_timeout_s`; one that never reports, since only another does, says nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaunch.agent.core.stack_groups import Stack

# Links are looked at once a second. What passes beyond this between two looks has passed without this agent: it was
# stopped, and so were its workers, perhaps.
LOOK_S_MAX = 2.0


@dataclass(frozen=True)
class Quiet:
    """How long a generation's workers have reported nothing, by what their agent saw: `reports` until `looked_s`."""

    reports: int = 0
    looked_s: float = 0.0
    quiet_s: float = 0.0
    is_over: bool = False

    def after(self, reports: int, now_s: float) -> Quiet:
        """The state after another look. Before the first report no time counts as quiet."""
        if reports > self.reports or not reports:
            return replace(self, reports=reports, looked_s=now_s, quiet_s=0.0)
        return replace(self, looked_s=now_s, quiet_s=self.quiet_s + min(now_s - self.looked_s, LOOK_S_MAX))


@dataclass(frozen=True)
class Standing:
    """What a worker reported last: a step (-1 for none) and what it was doing."""

    step: int
    phase: str = ""


@dataclass(frozen=True)
class Suspect:
    """The local rank to name, and what it did, as the middle of a sentence. `is_blameless` as in `Failure`."""

    local_rank: int
    message: str
    is_blameless: bool


def who_hangs(standings: Mapping[int, Standing], stacks: Mapping[int, Stack], quiet_s: float) -> Suspect:
    """The worker to name.

    `standings` has the workers that have reported and still run, and `stacks` those whose stack was taken. Named is one
    that a signal holds; else one that does not wait for other ranks while others do; else one that reported least.
    Only the first two point at this node: the ranks of other nodes are silent too, and one of those may be the cause.
    """
    # What stacks say is read only when somebody hangs: see needed_later.py.
    from elaunch.agent.core.waits import Doing, does_where, doing

    suspects, is_known = _suspects(standings, stacks)
    least = min(standings[rank].step for rank in suspects)
    behind = sorted(rank for rank in suspects if standings[rank].step == least)
    named, phase = behind[0], standings[behind[0]].phase
    stands = (f" since step {least}" if least >= 0 else "") + (f", in its phase {phase!r}" if phase else "")
    others = ", ".join(str(rank) for rank in behind[1:])
    if others:
        stands += f", as did local rank {others}"
    most = max(standing.step for standing in standings.values())
    if most > least:
        stands += f", while others had come to step {most}"
    is_seen = named in stacks and doing(stacks[named]) is not Doing.UNKNOWN
    does = f"; it {does_where(stacks[named])}" if is_seen else ""
    message = f"hung: it reported nothing for {quiet_s:.0f} s{stands}{does},"
    return Suspect(named, message, is_blameless=not is_known)


def _suspects(standings: Mapping[int, Standing], stacks: Mapping[int, Stack]) -> tuple[frozenset[int], bool]:
    """The workers that may be the cause, and whether their stacks say so."""
    from elaunch.agent.core.waits import Doing, doing, waits_for_ranks

    everybody = frozenset(standings)
    known = {rank: stack for rank, stack in stacks.items() if rank in everybody}
    held = frozenset(rank for rank, stack in known.items() if doing(stack) in (Doing.STOPPED, Doing.TRACED))
    waits = {rank: waits_for_ranks(stack) for rank, stack in known.items()}
    elsewhere = frozenset(rank for rank, is_waiting in waits.items() if is_waiting is False)
    if found := held or (elsewhere if True in waits.values() else frozenset()):
        return found, True
    return everybody, False
