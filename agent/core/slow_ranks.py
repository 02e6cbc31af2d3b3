"""Which rank of a node the others wait for, again and again; pure.

Ranks of a job step together, so all of them take equally long for a step. A slow rank shows in how they spend that
time: it works, and the others wait for it. This needs no word of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elaunch.agent.core.standstill import LOOK_S_MAX, Window

# A rank is named that was the slow one in so many windows in a row: two minutes.
WINDOW_S = 20.0
WINDOWS = 6
# The slow rank works for most of the time, and the others wait for at least this share of it.
_BUSY_MIN = 0.5
_WAIT_MIN = 0.10
# Ranks that do nothing at all are not slowed down: they wait for an evaluation, a checkpoint or a compilation.
_OTHERS_BUSY_MIN = 0.03


@dataclass(frozen=True)
class Slow:
    """The other ranks of the node wait for `local_rank`, for `wait_share` of the time, and have done for `lasted_s`.

    `seen` says how that was seen, as the end of a sentence, where it is not by the time for which each rank works.
    """

    local_rank: int
    wait_share: float
    lasted_s: float
    seen: str = ""


@dataclass(frozen=True)
class SlowRanks:
    """What is known of a generation's ranks.

    The window has lasted for `seconds`, of which each rank has worked for those in `worked_s`. `suspect` was the slow
    rank in each of the last windows, for whose `shares` the others waited; -1 if there is none.
    """

    seconds: float = 0.0
    worked_s: Mapping[int, float] = field(default_factory=dict)
    suspect: int = -1
    shares: tuple[float, ...] = ()

    def after(self, looks: Mapping[int, Window]) -> tuple[SlowRanks, Slow | None]:
        """The state after another look at the ranks, and the rank that is slow, at the end of each window."""
        seconds = max((look.seconds for look in looks.values()), default=0.0)
        if seconds > LOOK_S_MAX or (self.worked_s and looks.keys() != self.worked_s.keys()):
            # A rank has come or gone, or this agent was stopped meanwhile.
            return SlowRanks(), None
        worked_s = {rank: self.worked_s.get(rank, 0.0) + _worked_s(look) for rank, look in looks.items()}
        known = replace(self, seconds=self.seconds + seconds, worked_s=worked_s)
        return known._judged() if known.seconds >= WINDOW_S else (known, None)

    def _judged(self) -> tuple[SlowRanks, Slow | None]:
        found = _slowest({rank: worked_s / self.seconds for rank, worked_s in self.worked_s.items()})
        if found is None:
            return SlowRanks(), None
        rank, share = found
        all_shares = (*(self.shares if rank == self.suspect else ()), share)[-WINDOWS:]
        known = SlowRanks(suspect=rank, shares=all_shares)
        if len(all_shares) < WINDOWS:
            return known, None
        wait = sum(all_shares) / WINDOWS
        return known, Slow(rank, wait, WINDOWS * WINDOW_S)


def _worked_s(look: Window) -> float:
    """Seconds in which the main thread did not wait: on a CPU, in the queue for one, or for a disk."""
    if look.state == "D":
        return look.seconds
    return min(look.main_cpu_s + look.main_delay_s, look.seconds)


def _slowest(busy: Mapping[int, float]) -> tuple[int, float] | None:
    """The rank that the others wait for in this window, and for which share of it they wait."""
    if len(busy) < 2:
        return None
    rank = max(busy, key=lambda rank: (busy[rank], -rank))
    others = [share for other, share in busy.items() if other != rank]
    # Every other rank waits for the slow one. If one does not, it is as slow, or has work of its own.
    is_alone = busy[rank] - max(others) >= _WAIT_MIN
    if busy[rank] < _BUSY_MIN or not is_alone or median(others) < _OTHERS_BUSY_MIN:
        return None
    return rank, busy[rank] - median(others)


def median(values: Iterable[float]) -> float:
    """Their median."""
    # Imported here: it brings decimal and fractions, and the agent starts sooner without.
    import statistics

    return statistics.median(values)
