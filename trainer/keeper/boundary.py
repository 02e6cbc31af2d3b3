"""Requests to stop: noted when they arrive, and obeyed by all ranks after the same step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from enum import IntEnum

from elaunch.trainer.keeper.stop import StopRequest
from elaunch.trainer.ranks.peers import Peers


class Wish(IntEnum):
    """The reason for a stop. If several arrive, the greatest counts."""

    NONE = 0
    JOIN = 1
    LEAVE = 2
    INTERRUPT = 3

    @property
    def exit_code(self) -> int:
        """The exit code of a script that stopped for this reason."""
        return 130 if self is Wish.INTERRUPT else 143

    @property
    def reason(self) -> str:
        """The reason as the end of a sentence."""
        return {
            Wish.NONE: "for no reason",
            Wish.JOIN: "for nodes that join",
            Wish.LEAVE: "as it was told to leave",
            Wish.INTERRUPT: "as it was interrupted",
        }[self]


class Stopped(SystemExit):
    """All ranks have stopped after the same step, because of `wish`. The exception ends the script."""

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish.exit_code)
        self.wish = wish


class Boundary:
    """Collects the requests to this rank, from signals and from its agent; `agreed` combines those of all ranks."""

    def __init__(self, peers: Peers, signals: StopRequest, say: Callable[[str], None]) -> None:
        self._peers, self._signals, self._say = peers, signals, say
        self._told = Wish.NONE
        self._news = ""

    def tell(self, reason: str) -> None:
        """The agent asks for a stop ("join", "leave", "interrupt"). Call this from any thread."""
        wish = {"join": Wish.JOIN, "interrupt": Wish.INTERRUPT}.get(reason, Wish.LEAVE)
        self._told = max(self._told, wish)

    def report(self, news: str) -> None:
        """Say this at the next boundary. If all ranks have such a sentence there, only the lowest one says its own."""
        self._news = self._news or news

    def agreed(self, *, wants_snapshot: bool, wants_copy: bool) -> tuple[Wish, bool, bool]:
        """Why all ranks stop now; whether all want a snapshot now; whether all want a copy of the next step.

        Collective: every rank gets the same.
        """
        order = self._peers.world_size - self._peers.rank
        wish = max(self._told, self._noted())
        found, *refused, speaker = self._peers.largest(
            [wish, not wants_snapshot, not wants_copy, order if self._news else 0]
        )
        if speaker == order:
            self._say(self._news)
        self._news = ""
        return Wish(found), not refused[0], not refused[1]

    def _noted(self) -> Wish:
        match self._signals.signum:
            case 0:
                return Wish.NONE
            case signal.SIGINT:
                return Wish.INTERRUPT
            case _:
                return Wish.LEAVE
