"""What the agent says to its workers on their links, as data and as a line of JSON.

What they say to it is read in `links.py`; the worker's side of both is `trainer/link.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum


class StopReason(Enum):
    """Why workers are to stop: nodes come, so that training goes on at once; a node goes; the job ends."""

    JOIN = "join"
    LEAVE = "leave"
    INTERRUPT = "interrupt"


@dataclass(frozen=True)
class StopAtStepBoundary:
    """All ranks are to stop after the same step; whoever has said `stopped` may take its time to save, and exits."""

    reason: StopReason


@dataclass(frozen=True)
class PeerFailed:
    """The group is broken: save what only this worker holds, and say `saved`; SIGKILL is the answer to that."""

    generation: int


@dataclass(frozen=True)
class ShowStacks:
    """Write to stderr what all threads are doing."""


Message = StopAtStepBoundary | PeerFailed | ShowStacks


def line_of(message: Message) -> bytes:
    """The message as it goes over the link."""
    match message:
        case StopAtStepBoundary(reason):
            said: dict[str, object] = {"event": "stop_at_step_boundary", "reason": reason.value}
        case PeerFailed(generation):
            said = {"event": "peer_failed", "generation": generation}
        case ShowStacks():
            said = {"event": "stacks"}
    return json.dumps(said).encode() + b"\n"
