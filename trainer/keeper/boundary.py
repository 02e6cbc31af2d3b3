"""Wishes to stop, noted whenever they come and obeyed by all ranks at the same step."""

from __future__ import annotations

import signal
from enum import IntEnum

from elaunch.trainer.keeper.stop import StopRequest
from elaunch.trainer.ranks.peers import Peers


class Wish(IntEnum):
    """Why to stop; of several wishes the greatest counts."""

    NONE = 0
    JOIN = 1
    LEAVE = 2
    INTERRUPT = 3

    @property
    def exit_code(self) -> int:
        """What a script exits with that stopped for this."""
        return 130 if self is Wish.INTERRUPT else 143

    @property
    def reason(self) -> str:
        """In words."""
        return {
            Wish.NONE: "for no reason",
            Wish.JOIN: "for nodes that join",
            Wish.LEAVE: "as it was told to leave",
            Wish.INTERRUPT: "as it was interrupted",
        }[self]


class Stopped(SystemExit):
    """All ranks have stopped after the same step, for `wish`: the script is unwound."""

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish.exit_code)
        self.wish = wish


class Boundary:
    """Collects this rank's wishes, from signals and from its agent; `agreed` makes them everybody's."""

    def __init__(self, peers: Peers, signals: StopRequest) -> None:
        self._peers, self._signals = peers, signals
        self._told = Wish.NONE

    def tell(self, reason: str) -> None:
        """The agent asks for a stop ("join", "leave", "interrupt"); from any thread."""
        wish = {"join": Wish.JOIN, "interrupt": Wish.INTERRUPT}.get(reason, Wish.LEAVE)
        self._told = max(self._told, wish)

    def agreed(self, *, wants_snapshot: bool) -> tuple[Wish, bool]:
        """Why all ranks stop now, and whether all want a snapshot now; the same answer everywhere."""
        wish, refused = self._peers.largest([max(self._told, self._noted()), not wants_snapshot])
        return Wish(wish), not refused

    def _noted(self) -> Wish:
        match self._signals.signum:
            case 0:
                return Wish.NONE
            case signal.SIGINT:
                return Wish.INTERRUPT
            case _:
                return Wish.LEAVE
