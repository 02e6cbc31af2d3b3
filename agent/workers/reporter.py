"""Passes on what the agent learns about this node's workers."""

from __future__ import annotations

from collections.abc import Callable

from elaunch.agent.core.events import Event
from elaunch.agent.output.timeline import Timeline
from elaunch.records import dataclass
from elaunch.rendezvous.types import Failure, FailureKind


@dataclass(frozen=True)
class Reporter:
    """Events go to `post`, sentences for the log to `say`, stages of a generation to `timeline`.

    `node_failure(kind, generation, message)` makes a failure of this node that no rank has caused.
    """

    post: Callable[[Event], None]
    say: Callable[[str], None]
    timeline: Timeline
    node_failure: Callable[[FailureKind, int, str], Failure]
