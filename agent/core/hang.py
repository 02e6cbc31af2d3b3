"""When workers that have reported before report nothing any more, and what is said of it; pure.

Ranks of a job wait for each other: one that hangs silences all. So the workers of a node hang when none of them reports
anything for `hang_timeout_s`; one that never reports, since only another does, says nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elaunch.records import dataclass

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
    """What a worker reported last: a step (-1 for none) and what it was doing; and whether its process is stopped."""

    step: int
    phase: str = ""
    is_stopped: bool = False


def who_hangs(standings: Mapping[int, Standing], quiet_s: float) -> tuple[int, str]:
    """The local rank to name, of those that reported least, and what it did, as the middle of a sentence.

    `standings` has the workers that have reported and still run. The others wait for one whose process is stopped.
    """
    stopped = {rank: standing for rank, standing in standings.items() if standing.is_stopped}
    if stopped and len(stopped) < len(standings):
        return who_hangs(stopped, quiet_s)
    least = min(standing.step for standing in standings.values())
    behind = sorted(rank for rank, standing in standings.items() if standing.step == least)
    phase = standings[behind[0]].phase
    stands = (f" since step {least}" if least >= 0 else "") + (f", in its phase {phase!r}" if phase else "")
    others = ", ".join(str(rank) for rank in behind[1:])
    if others:
        stands += f", as did local rank {others}"
    if len(behind) < len(standings):
        most = max(standing.step for standing in standings.values())
        stands += f", while others had come to step {most}"
    if stopped:
        stands += ", as its process is stopped (by SIGSTOP or a debugger)"
    return behind[0], f"hung: it reported nothing for {quiet_s:.0f} s{stands},"
