"""Passes on what the agent learns about this node's workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elaunch.agent.config import Level
from elaunch.agent.core.events import Event
from elaunch.agent.output.timeline import Timeline
from elaunch.rendezvous.types import Failure, FailureKind


@dataclass(frozen=True)
class Reporter:
    """Events go to `post`, sentences for the log to `tell`, stages of a generation to `timeline`.

    `node_failure(kind, generation, message)` makes a failure of this node that no rank has caused.
    """

    post: Callable[[Event], None]
    tell: Callable[[str, Level], None]
    timeline: Timeline
    node_failure: Callable[[FailureKind, int, str], Failure]

    def say(self, text: str) -> None:
        """Log a sentence."""
        self.tell(text, "info")

    def detail(self, text: str) -> None:
        """Log what is of use to somebody who asks for more (--verbose)."""
        self.tell(text, "debug")

    def warn(self, text: str) -> None:
        """Log what may need a person."""
        self.tell(text, "warning")
