"""What the agent says to its workers on their links; `workers/link.py` has the form in which it goes out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StopReason(Enum):
    """Why workers are to stop: nodes come, so that training goes on at once; a node goes; the job ends."""

    JOIN = "join"
    LEAVE = "leave"
    INTERRUPT = "interrupt"


@dataclass(frozen=True)
class StopAtStepBoundary:
    """All ranks have to stop after the same step. A worker that said `stopped` may take its time to save and exit."""

    reason: StopReason


@dataclass(frozen=True)
class PeerFailed:
    """The group is broken: save what only this worker holds, and say `saved`; SIGKILL is the answer to that."""

    generation: int


@dataclass(frozen=True)
class ShowStacks:
    """Write to stderr what all threads are doing."""


Message = StopAtStepBoundary | PeerFailed | ShowStacks
